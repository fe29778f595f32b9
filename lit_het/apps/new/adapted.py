"""The part of ``lit-het new --adapt``: both towers of an image-text model, trained further on one's own pairs."""

import re
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError

# The tuning of both towers, as Python, and the learning rate. Both towers whole: that of FLYP (Goyal et al. 2023,
# App. D); the more parameters stay, the larger.
_WAYS = {
    "lora": ("Tuning(lora=LoRA(rank=8))", "1e-4"),
    "last": ("Tuning(last_blocks={blocks})", "3e-5"),
    "full": ("None", "1e-5"),
}
# What `lit_het.apps.new.project` puts into its configuration.
PARTS = {
    "summary": """{name}: both towers of a trained model, adapted ({adapt}) to {count:,} image-text pairs.

Written by lit-het new for {devices}.
Afterwards lit-het merge takes means of its weights and those it started from, and lit-het add-noise adds a noise head.
""",
    "constants": "START = {tower}\n",
    "before": """\
    start = load_config(START)  # its images and captions were preprocessed in the same way
    tuning = {tuning}  # what is trained of each tower; None for all of it
""",
    "task": """dataclasses.replace(
            start.task,
            image_tower=dataclasses.replace(start.task.image_tower, tuning=tuning, weights=None),
            text_tower=dataclasses.replace(start.task.text_tower, tuning=tuning, weights=None),
            locked=(),
        )""",
    "images": "image_size=start.data.image_size",
    "texts": "captions={captions},\n            preprocessing=start.data.preprocessing",
    "fields": """tokenizer=dataclasses.replace(start.tokenizer, model=tokenizer_path(START)),
        pretrained=PretrainedConfig(run=START, pattern=".*"),  # head and temperature, too
        optimizer=Optimizer(AdamW(second_decay=0.98), weight_decay=0.1 * {rate}, layer_decay={layer_decay}),
        """,
    "rate": "{rate}",
    "held_out": "Calibrated and evaluated on, but not trained on",
}


def check_way(way: str) -> None:
    """Raises a `UserError` if there is no such way to adapt a model."""
    if not re.fullmatch(r"lora|last-[1-9]\d{0,3}|full", way):
        raise UserError(f"--adapt {way} is not one of lora, last-4 (or another number of blocks) and full")


def adapted_fields(way: str, start: Path, source: ExperimentConfig) -> dict[str, object]:
    """Returns the parts of the configuration that depend on how a model is adapted.

    Args:
        way: see `check_way`.
        start: the model.
        source: its configuration.
    """
    if source.task.text_tower is None or not source.task.embeds_texts:
        raise UserError(f"{start} is no image-text model: leave out --adapt to train a text tower on its image tower")
    if source.tokenizer is None:
        raise UserError(f"{start} has no tokenizer: import the model with lit-het import --tokenizer FILE")
    kind, _, blocks = way.partition("-")
    most = min(tower.encoder.depth for tower in source.task.towers.values() if tower.encoder is not None)
    if blocks and int(blocks) > most:
        raise UserError(f"--adapt {way} is more than the {most} blocks of a tower of {start}; take full")
    tuning, rate = _WAYS[kind]
    # Of whole towers the lowest layers change least.
    decay = 0.8 if kind == "full" else 1.0
    return {"adapt": way, "tuning": tuning.format(blocks=blocks), "rate": rate, "layer_decay": decay}
