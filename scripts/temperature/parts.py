"""The paper's other tables on τ and on the noise of a head: one function for each."""

import dataclasses
from collections.abc import Mapping

from lit_het.configs import quickstart_lit_het_xl
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.eval.suite import ClassNamesConfig
from lit_het.heads.classification_config import DeterministicConfig, HetConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.noise_config import SamplingConfig
from lit_het.heads.temperature_config import BoundedTemperature
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.temperature.data import ALL, ENCODER, tower_config
from scripts.temperature.methods import GRID, LEARNED, RANGE, of_temperature
from scripts.temperature.runs import HEAD, NOISE, Runner, Setting, fixed, with_temperature
from scripts.temperature.tables import Row

# App. K: initial τ, τmin and τmax, with the figures of Tables 19 and 20.
RANGES = {
    (2.525, 0.05, 5.0): ("5.71", "0.486"),
    (1.25, 0.05, 5.0): ("5.59", "0.485"),
    (3.75, 0.05, 5.0): ("5.73", "0.485"),
    (4.9, 0.05, 5.0): ("5.72", "0.478"),
    (2.525, 0.001, 5.0): ("5.50", "0.488"),
    (2.525, 0.01, 5.0): ("5.73", "0.485"),
    (2.525, 0.05, 4.0): ("5.95", "0.485"),
    (2.525, 0.05, 3.0): ("5.61", "0.485"),
}
# Table 14.
SAMPLES = {
    1000: ("5.71", "0.486"),
    1: ("5.69", "0.476"),
    4: ("5.68", "0.478"),
    16: ("6.12", "0.476"),
    64: ("5.99", "0.480"),
    256: ("5.79", "0.485"),
    512: ("5.70", "0.484"),
}
# Tables 15 and 16, with M as a fraction of the size of the features.
SIZES = {
    None: ("5.71", "0.486"),
    1: ("5.62", "0.487"),
    2: ("5.74", "0.484"),
    4: ("5.66", "0.477"),
    8: ("5.66", "0.472"),
    16: ("5.68", "0.468"),
    32: ("5.74", "0.465"),
}
_SAMPLING = HEAD.sampling


def ranges(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Tables 19 and 20: the start of a learned τ, and its bounds."""
    rows = []
    for (initial, low, high), printed in RANGES.items():
        temperature = BoundedTemperature(low, high, initial)
        is_base = temperature == dataclasses.replace(RANGE, initial=initial) and initial == 2.525
        name = f"range_{initial:g}_{low:g}_{high:g}"
        setting = LEARNED if is_base else Setting(name, with_temperature(HEAD, temperature))
        rows.append(_row(runner, f"τ0 = {initial:g}, from {low:g} to {high:g}", printed, setting, seeds))
    return rows


def samples(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Table 14: S, in training and in evaluation."""
    rows = []
    for count, printed in SAMPLES.items():
        sampling = SamplingConfig(num_samples=count, num_eval_samples=count)
        setting = Setting(f"samples{count}", dataclasses.replace(HEAD, sampling=sampling, temperature=RANGE))
        rows.append(_row(runner, f"S = {count}", printed, setting, seeds))
    return rows


def sizes(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Tables 15 and 16: M, the size of a noise space with a matrix of its own."""
    rows = []
    for part, printed in SIZES.items():
        if part is None:
            rows.append(_row(runner, "W shared", printed, LEARNED, seeds))
            continue
        size = ENCODER.width // part
        setting = Setting(f"size{size}", dataclasses.replace(HEAD, unshared_size=size, temperature=RANGE))
        rows.append(_row(runner, f"W', M = {size} (D / {part})", printed, setting, seeds))
    return rows


def learning(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Table 8, printed ones those of ImageNet-21k: heads with τ = 1, and with a learned τ."""
    heads = {"DET": DeterministicConfig(), "HET": HetConfig(NOISE, sampling=_SAMPLING), "HET-XL": HEAD}
    printed = {
        "DET": (("5.79", "0.461"), ("5.82", "0.458")),
        "HET": (("5.72", "0.475"), ("5.72", "0.475")),
        "HET-XL": (("5.72", "0.475"), ("5.71", "0.486")),
    }
    rows = []
    for title, head in heads.items():
        one, learned = (
            Setting(f"{title}_{name}", with_temperature(head, temperature))
            for name, temperature in (("tau1", fixed(1.0)), ("learned", RANGE))
        )
        if title == "HET-XL":
            learned = LEARNED
        rows += [
            _row(runner, f"{title}, τ = 1", printed[title][0], one, seeds),
            _row(runner, f"{title}, τ learned", printed[title][1], learned, seeds),
        ]
    return rows[::-1]  # HET-XL with a learned τ first


def epochs(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Table 9: a learned τ and the grid's, with a short and a long training."""
    rows = []
    for count, printed in (
        (2.0, (("7.507", "0.274"), ("7.988", "0.232"))),
        (8.0, (("5.78", "0.474"), ("5.80", "0.471"))),
    ):
        name = f"epochs{count:g}"
        learned = LEARNED if count == LEARNED.epochs else dataclasses.replace(LEARNED, name=name, epochs=count)
        rows.append(_row(runner, f"{count:g} epochs, τ learned", printed[0], learned, seeds))
        best: dict[int, Mapping[str, float]] = {}
        for seed in seeds:
            found = [
                of_temperature(runner, tau, ALL, seed)
                if count == LEARNED.epochs
                else {
                    **runner.figures(
                        Setting(f"{name}_tau{tau:g}", with_temperature(HEAD, fixed(tau)), epochs=count), seed
                    ),
                    "temperature": tau,
                }
                for tau in GRID
            ]
            best[seed] = min(found, key=lambda one: one["test/nll"])
        rows.append(Row(f"{count:g} epochs, τ of the grid", *printed[1], best))
    return rows


# Table 7: normalization before and after the noise, with zero-shot accuracies on ImageNet.
PLACEMENTS = {(True, False): "84.37", (True, True): "84.65", (False, True): "84.07", (False, False): "82.22"}
# App. M.
TEST_SAMPLES = 22


def pairs(runner: Runner, seeds: list[int]) -> list[Row]:
    """Returns the rows of Table 7, of image-text models: where embeddings are normalized."""
    rows = []
    for (before, after), printed in PLACEMENTS.items():
        name = f"pairs_{'before' if before else ''}{'after' if after else ''}"
        config = _pairs_config(runner, before=before, after=after)
        found = {seed: runner.result_of(config, name, seed, "zero_shot") for seed in seeds}
        rows.append(Row(f"before noise: {_said(before)}, after: {_said(after)}", "", printed, found))
    return rows


def _said(is_true: bool) -> str:
    return "yes" if is_true else "no"


def _pairs_config(runner: Runner, *, before: bool, after: bool) -> ExperimentConfig:
    """Returns an image-text model on the stored embeddings, as the quickstart's but with the tower of the study."""
    base, tower = quickstart_lit_het_xl.get_config(runner.root), tower_config(runner.root).task
    assert isinstance(base.task, ContrastiveConfig)
    assert isinstance(base.task.head, HetXLContrastiveConfig)
    assert isinstance(tower, ClassificationConfig)
    head = dataclasses.replace(
        base.task.head, normalize_before_noise=before, normalize_after_noise=after, num_samples=8
    )
    text = dataclasses.replace(base.task.text_tower, embedding_size=ENCODER.width)
    names = ClassNamesConfig(candidates=runner.root / "data" / ALL / "classnames.txt")
    data = dataclasses.replace(runner.data(ALL), batch_size=128)
    return dataclasses.replace(
        base,
        run_dir=runner.root,
        task=dataclasses.replace(base.task, image_tower=tower.image_tower, text_tower=text, head=head),
        data=data,
        pretrained=PretrainedConfig(runner.root / "tower"),
        length=Duration(400),
        schedule=Schedule(2e-3, warmup=Duration(30)),
        cadence=dataclasses.replace(base.cadence, log_steps=100, save_steps=100_000),
        evaluations=runner.evaluations(ALL, TEST_SAMPLES, names=names),
    )


def _row(runner: Runner, title: str, printed: tuple[str, str], setting: Setting, seeds: list[int]) -> Row:
    return Row(title, *printed, {seed: runner.figures(setting, seed) for seed in seeds})
