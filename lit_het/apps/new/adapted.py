"""The part of ``lit-het new --adapt``: both towers of an image-text model, trained further on one's own pairs."""

import re
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.fine_tune_pair import LAYER_DECAY, RANK, RATES
from lit_het.errors import UserError

_TUNED = """dataclasses.replace(
            model,
            image_tower=dataclasses.replace(model.image_tower, tuning=tuning),
            text_tower=dataclasses.replace(model.text_tower, tuning=tuning),
        )"""
# What `lit_het.apps.new.project` puts into its configuration.
PARTS = {
    "summary": """{name}: both towers of a trained model, adapted ({adapt}) to {count:,} image-text pairs.

Written by lit-het new for {devices}.
Afterwards lit-het merge takes means of its weights and those it started from, and lit-het add-noise adds a noise head.
""",
    "constants": "START = {tower}\n",
    "before": """\
    start = load_config(START)  # its images and captions were preprocessed in the same way
    model = start.task.bare()  # without what was trained beside it
{tuning}""",
    "task": "{task}",
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
    if source.task.text_members > 1:
        raise UserError(f"{start} has {source.task.text_members} text towers; --adapt takes a model with one")
    kind, _, blocks = way.partition("-")
    has_blocks = all(tower.encoder is not None for tower in source.task.towers.values())
    if kind == "full":
        tuning, task = "", "model"
    elif not has_blocks:
        raise UserError(f"{start} has a ResNet, of which --adapt {way} cannot train a part; take full")
    else:
        most = min(tower.encoder.depth for tower in source.task.towers.values())
        if blocks and int(blocks) > most:
            raise UserError(f"--adapt {way} is more than the {most} blocks of a tower of {start}; take full")
        shown = f"lora=LoRA(rank={RANK})" if kind == "lora" else f"last_blocks={blocks}"
        tuning, task = f"    tuning = Tuning({shown})  # what is trained of each tower\n", _TUNED
    # No paper has a layer decay for a ResNet.
    decay = LAYER_DECAY if kind == "full" and has_blocks else 1.0
    rate = f"{RATES[kind]:.0e}".replace("e-0", "e-")
    return {"adapt": way, "tuning": tuning, "task": task, "rate": rate, "layer_decay": decay}
