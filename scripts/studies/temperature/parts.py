"""The paper's other tables on τ and on the noise of a head: one function for each."""

import dataclasses
from typing import Literal

from lit_het.configs import quickstart_lit_het_xl
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.eval.suite import ClassNamesConfig
from lit_het.heads.classification_config import DeterministicConfig, HetConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.noise_config import SamplingConfig
from lit_het.heads.temperature_config import BoundedTemperature, TemperatureConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.studies.temperature.data import ALL, ENCODER, tower_config
from scripts.studies.temperature.methods import LEARNED, RANGE, of_temperature, search_grid
from scripts.studies.temperature.runs import HEAD, NOISE, Row, Runner, Setting, fixed, with_temperature

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
# Tables 15 and 16: W shared, and M as a fraction of the size of the features.
SHARED = ("5.71", "0.486")
SIZES = {
    1: ("5.62", "0.487"),
    2: ("5.74", "0.484"),
    4: ("5.66", "0.477"),
    8: ("5.66", "0.472"),
    16: ("5.68", "0.468"),
    32: ("5.74", "0.465"),
}


def ranges(runner: Runner) -> list[Row]:
    """Returns the rows of Tables 19 and 20: the start of a learned τ, and its bounds."""
    rows = []
    for (initial, low, high), printed in RANGES.items():
        temperature = BoundedTemperature(low, high, initial)
        is_base = temperature == dataclasses.replace(RANGE, initial=initial) and initial == 2.525
        name = f"range_{initial:g}_{low:g}_{high:g}"
        setting = LEARNED if is_base else Setting(name, with_temperature(HEAD, temperature))
        rows.append(runner.row(f"τ0 = {initial:g}, from {low:g} to {high:g}", setting, *printed))
    return rows


def samples(runner: Runner) -> list[Row]:
    """Returns the rows of Table 14: S, in training and in evaluation."""
    rows = []
    for count, printed in SAMPLES.items():
        sampling = SamplingConfig(num_samples=count, num_eval_samples=count)
        setting = Setting(f"samples{count}", dataclasses.replace(HEAD, sampling=sampling, temperature=RANGE))
        rows.append(runner.row(f"S = {count}", setting, *printed))
    return rows


def sizes(runner: Runner) -> list[Row]:
    """Returns the rows of Tables 15 and 16: M, the size of a noise space with a matrix of its own."""
    rows = [runner.row("W shared", LEARNED, *SHARED)]
    for part, printed in SIZES.items():
        size = ENCODER.width // part
        setting = Setting(f"size{size}", dataclasses.replace(HEAD, unshared_size=size, temperature=RANGE))
        rows.append(runner.row(f"W', M = {size} (D / {part})", setting, *printed))
    return rows


# Table 8, of ImageNet-21k: heads with τ = 1, and with a learned τ; the first is the one to compare with.
HEADS = {
    "HET-XL": (HEAD, ("5.72", "0.475"), ("5.71", "0.486")),
    "HET": (HetConfig(NOISE, sampling=HEAD.sampling), ("5.72", "0.475"), ("5.72", "0.475")),
    "DET": (DeterministicConfig(), ("5.79", "0.461"), ("5.82", "0.458")),
}


def learning(runner: Runner) -> list[Row]:
    """Returns the rows of Table 8."""
    rows = []
    for title, (head, of_one, of_learned) in HEADS.items():
        learned = LEARNED if head is HEAD else Setting(f"{title}_learned", with_temperature(head, RANGE))
        one = Setting(f"{title}_tau1", with_temperature(head, fixed(1.0)))
        rows.append(runner.row(f"{title}, τ learned", learned, *of_learned))
        rows.append(runner.row(f"{title}, τ = 1", one, *of_one))
    return rows


# Table 9: by epochs, a learned τ and that of the grid.
EPOCHS = {2.0: (("7.507", "0.274"), ("7.988", "0.232")), 8.0: (("5.78", "0.474"), ("5.80", "0.471"))}


def epochs(runner: Runner) -> list[Row]:
    """Returns the rows of Table 9: a learned τ and the grid's, with a short and a long training."""
    rows = []
    for count, (of_learned, of_grid) in EPOCHS.items():
        longer = dataclasses.replace(LEARNED, name=f"epochs{count:g}", epochs=count)
        learned = LEARNED if count == LEARNED.epochs else longer
        rows.append(runner.row(f"{count:g} epochs, τ learned", learned, *of_learned))
        best = {seed: search_grid(runner, ALL, "test/nll", seed, count) for seed in runner.options.seeds}
        rows.append(Row(f"{count:g} epochs, τ of the grid", *of_grid, best))
    return rows


def dynamics(runner: Runner) -> list[Row]:
    """Returns the rows of Table 18: a learned τ, and new runs with the τ that each of these ended with."""
    learned = runner.row("τ learned", LEARNED, *SHARED)
    ends = {seed: found["temperature"] for seed, found in learned.by_seed.items()}
    again = {seed: of_temperature(runner, tau, ALL, seed) for seed, tau in ends.items()}
    return [learned, Row("τ fixed at the learned value", "5.74", "0.486", again)]


# Table 21, with the same number of parameters.
TERMS: dict[str, tuple[Literal["rank_one", "diagonal"], TemperatureConfig, str, str]] = {
    "d dᵀ, τ learned": ("rank_one", RANGE, *SHARED),
    "diag(d), τ learned": ("diagonal", RANGE, "5.67", "0.486"),
    "d dᵀ, τ = 1": ("rank_one", fixed(1.0), "5.72", "0.474"),
    "diag(d), τ = 1": ("diagonal", fixed(1.0), "5.72", "0.473"),
}


def terms(runner: Runner) -> list[Row]:
    """Returns the rows of Table 21: the second term of the covariance, a matrix of rank one or a diagonal."""
    rows = []
    for title, (term, temperature, *printed) in TERMS.items():
        noise = dataclasses.replace(NOISE, second_term=term)
        name = f"term_{term}_{'learned' if temperature == RANGE else 'tau1'}"
        head = dataclasses.replace(HEAD, covariance=noise, temperature=temperature)
        rows.append(runner.row(title, LEARNED if head == LEARNED.head else Setting(name, head), *printed))
    return rows


# Table 7: normalization before and after the noise, with zero-shot accuracies on ImageNet.
PLACEMENTS = {(True, False): "84.37", (True, True): "84.65", (False, True): "84.07", (False, False): "82.22"}
# App. M.
TEST_SAMPLES = 22


def pairs(runner: Runner) -> list[Row]:
    """Returns the rows of Table 7, of image-text models: where embeddings are normalized."""
    rows = []
    for (before, after), printed in PLACEMENTS.items():
        name = f"pairs_{'before' if before else ''}{'after' if after else ''}"
        config = _pairs_config(runner, before=before, after=after)
        found = {seed: runner.result_of(config, name, seed, "zero_shot") for seed in runner.options.seeds}
        said = {True: "yes", False: "no"}
        rows.append(Row(f"before noise: {said[before]}, after: {said[after]}", "", printed, found))
    return rows


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
    loss = SoftmaxLoss(duplicates="negatives")  # the papers', without the quickstart's smoothing
    names = ClassNamesConfig(candidates=runner.root / "data" / ALL / "classnames.txt")
    data = dataclasses.replace(runner.data(ALL), batch_size=128)
    return dataclasses.replace(
        base,
        run_dir=runner.root,
        task=dataclasses.replace(base.task, image_tower=tower.image_tower, text_tower=text, head=head, loss=loss),
        data=data,
        pretrained=PretrainedConfig(runner.root / "tower"),
        length=Duration(400),
        schedule=Schedule(2e-3, warmup=Duration(30)),
        cadence=dataclasses.replace(base.cadence, log_steps=100, save_steps=100_000),
        evaluations=runner.evaluations(ALL, TEST_SAMPLES, names=names),
    )
