"""Makes the folders ``runs``, of a small run for each kind of task, and ``new_projects``, of ``lit-het new``.

Run by hand, once: ``python -m tests.frozen.make_runs``. Most runs are stopped after 2 of 4 steps. They are those of the
version that made them, which every later version must open, resume, evaluate and export. Only a change that is meant to
break old runs makes them anew.
"""

import contextlib
import dataclasses
import io
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import sentencepiece

from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.paths import locate_config
from tests import conftest, tiny

FROZEN = Path(__file__).parent
RUNS, PROJECTS, GOLDEN = FROZEN / "runs", FROZEN / "new_projects", FROZEN.parent / "golden"
STOPPED, STEPS = 2, 4

Flags = Mapping[str, object]


def _encoder(path: str, depth: int = 1) -> Flags:
    sizes = {"width": 16, "depth": depth, "mlp-width": 16, "num-heads": 2, "compute-type": "float32"}
    return {f"task.{path}.encoder.{name}": value for name, value in sizes.items()}


_TOKENS = {"vocabulary-size": 40, "length": 8}
_TOKENIZER = {"tokenizer.model": "shapes/tokenizer.model", "tokenizer.length": 8}
_IMAGE = {"task.image-tower.image-size": 16, "task.image-tower.patch-size": 8, "data.image-size": 16}
_TEXT = {f"task.text-tower.{name}": value for name, value in _TOKENS.items()}
_DECODER = {f"task.decoder.{name}": value for name, value in _TOKENS.items()}
_TOWERS = {
    **_IMAGE,
    **_TEXT,
    **_TOKENIZER,
    **_encoder("image-tower"),
    **_encoder("text-tower"),
    "task.text-tower.embedding-size": 16,
}
_LOCKED = {"pretrained.run": "classifier"}
_ALL = {
    "data.shards": "shapes/train",
    "data.batch-size": 8,
    "data.threads": 1,
    "mesh.fsdp": 1,
    "calibration": None,
    "length": f"{STEPS} steps",
    "schedule.learning-rate": 0.01,
    "schedule.warmup": "1 steps",
    "cadence.log-steps": 1,
    "cadence.save-steps": STOPPED,
    "cadence.keep": STEPS,
}
# The shipped configuration and the flags of each run; locked towers come before the runs that read them.
TRAININGS: Mapping[str, tuple[str, Flags]] = {
    "classifier": (
        "glyph_classifier",
        {**_IMAGE, **_encoder("image-tower"), "task.num-classes": 8, "task.head.covariance.num-factors": 2},
    ),
    "deterministic": ("quickstart_lit_deterministic", {**_TOWERS, **_LOCKED}),
    "het_xl": ("quickstart_lit_het_xl", {**_TOWERS, **_LOCKED}),
    # Long enough to be better than chance, so that a temperature fits.
    "calibrated": (
        "quickstart_lit_het_xl",
        {**_TOWERS, **_LOCKED, **dict.fromkeys(("length", "cadence.log-steps", "cadence.save-steps"), 200)},
    ),
    "gaussian": (
        "prolip_b16",
        {
            **_TOWERS,
            "task.image-tower.projection-size": 16,
            "task.text-tower.embedding-size": 32,  # means and variances
            "task.masking.mask-token": 39,
        },
    ),
    "captioner": (
        "quickstart_lit_deterministic",
        {
            **_TOWERS,
            **_LOCKED,
            "task.captioner": "captioner",
            **{f"task.captioner.decoder.{name}": value for name, value in _TOKENS.items()},
            **_encoder("captioner.decoder"),
            "data.prompt": "",
            "optimizer.rule": "adafactor",
        },
    ),
    "decoder": (
        "quickstart_decoder",
        {**_IMAGE, **_DECODER, **_TOKENIZER, **_LOCKED, **_encoder("image-tower"), **_encoder("decoder")},
    ),
    "experts": (
        "fine_tune_experts:model=e3",
        {
            **_IMAGE,
            **_encoder("image-tower", depth=2),
            "task.image-tower.weights": None,
            "task.image-tower.encoder.experts.num-experts": 4,
            "task.image-tower.encoder.experts.num-blocks": 1,
            "task.num-classes": 8,
        },
    ),
    "translation": (
        "translation_base",
        {
            **_TEXT,
            **_DECODER,
            **_TOKENIZER,
            **_encoder("text-tower"),
            **_encoder("decoder"),
            "data.shards": "translations",
            "schedule.decay.timescale": "1 steps",
        },
    ),
}


def make() -> None:
    """Writes an archive of each run, and of each set that they read; and the projects."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), conftest.one_device():
        _write_data()
        for name, (configuration, flags) in TRAININGS.items():
            _train(name, configuration, {**_ALL, **flags})
            if name == "calibrated":
                _run("calibrate", name, "--data", "pairs/train")
            else:
                _stop(Path(name))
        shutil.copytree(GOLDEN / "hf_siglip", "siglip")
        _run("import", "--from", "siglip", "--to", "imported", "--tokenizer", "shapes/tokenizer.model")
        head = ("--task.head", "bayes_vlm", "--calibration", "90%:")
        _run("add-noise", "--model", "imported", "--data", "pairs/train", "--output", "posterior", *head)
        _write_projects()
        _archive()


def _write_data() -> None:
    shapes = tiny.write_data(Path("shapes"), num_samples=16)
    tiny.write_data(Path("pairs"), num_samples=1000, seed=1, every_wrong=7)  # more than are kept
    names = (shapes / "train/classnames.txt").read_text().splitlines()
    german = [f"{colour} {shape}" for colour in ("rot", "gruen", "blau", "grau") for shape in ("quadrat", "balken")]
    texts = [{"__key__": f"{key:04d}", "json": {"en": name, "de": german[key]}} for key, name in enumerate(names)]
    write_shards(Path("translations"), texts)
    # The usual tables of normalization would be 240 KB.
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*names, *german]),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (shapes / "tokenizer.model").write_bytes(model.getvalue())


def _train(name: str, configuration: str, flags: Flags) -> None:
    config = experiment.load_module_config(locate_config(Path(configuration)))
    config = dataclasses.replace(config, evaluations=(), data=dataclasses.replace(config.data, mixture=()))
    with tempfile.TemporaryDirectory() as folder:
        experiment.save(config, Path(folder, "config.json"))
        changes = [part for flag, value in {"run-dir": name, **flags}.items() for part in (f"--{flag}", value)]
        _run("train", "--config", Path(folder, "config.json"), *changes)


def _stop(run_dir: Path) -> None:
    """Leaves what a finished run had written when it had saved its first checkpoint."""
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:STOPPED]))


def _write_projects() -> None:
    """Writes the projects, as if everything were in a folder ``/data``."""
    shutil.rmtree(PROJECTS, ignore_errors=True)
    for name, tower in (("first_tower", ("--classes",)), ("image_text", ("--tower", "classifier"))):
        _run("new", name, *tower, "--data", "pairs/train")
        config = Path(name, "config.py")
        config.write_text(config.read_text().replace(str(Path.cwd()), "/data"))
        Path(name, "tokenizer.model").unlink(missing_ok=True)  # as large as all of a run
        shutil.move(name, PROJECTS / name)


def _archive() -> None:
    """Writes the archives, without embeddings, and without what names the machine."""
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir()
    for name in (*TRAININGS, "imported", "posterior", "shapes", "translations"):
        for part in ("tensorboard", "embeddings"):
            shutil.rmtree(Path(name, part), ignore_errors=True)
        Path(name, "starts.jsonl").unlink(missing_ok=True)
        with tarfile.open(RUNS / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(name)


def _run(*command: object) -> None:
    assert main([str(part) for part in command]) == 0


if __name__ == "__main__":
    make()
