"""``lit-het new``: a project for one's own pairs, configured for the tower, the data and the machine."""

import collections
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import jax
import psutil

from lit_het.apps.new import adapted, first_tower
from lit_het.apps.tokenizer import train_tokenizer
from lit_het.configs.experiment import ExperimentConfig, load_module_config
from lit_het.console import Bar, message
from lit_het.data_pipelines.shards.hashed import identities
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.portions import Portion, Rule
from lit_het.data_pipelines.shards.urls import absolute, canonical
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.data_pipelines.texts.captions_config import TextPlace, member_of
from lit_het.errors import UserError
from lit_het.files import completed_folder
from lit_het.models.calibration.by_names import LEAST_NAMES
from lit_het.models.calibration.seen_names import MOST_SAMPLES
from lit_het.models.calibration.split import EXPECTED_IMAGES
from lit_het.planning.plan import Step
from lit_het.training.directory import checkpoint_dir, load_config, tokenizer_path
from lit_het.weights.importing import ImportOptions, import_weights

# Of the memory of a device, what a step may take by the formula of `lit-het plan`.
_SHARE_OF_MEMORY = 0.8
# (up to so many samples, text encoder, pieces of the tokenizer, epochs)
_SIZES = (
    (100_000, "EncoderConfig(width=256, depth=2, mlp_width=1024, num_heads=4)", 8_000, 20),
    (10_000_000, 'encoder_size("S")', 32_000, 10),
    (None, 'encoder_size("B")', 32_000, 2),
)
# A configuration: $parts differ between a text tower on a locked tower and a first tower; {fields} are the project's.
_CONFIGURATION = Template(
    '''"""$summary
Train it with lit-het train --config {name}/config.py
"""

{imports}

PROJECT = Path(__file__).resolve().parent
${constants}SHARDS = {shards}


def get_config() -> ExperimentConfig:
    """Returns the run; every field is also a flag, such as --length "5 epochs"."""
${before}    return ExperimentConfig(
        run_dir=PROJECT / "run",
        task=$task,
        data=LoaderConfig(
            shards=(SHARDS,),
            $images,
            batch_size={batch},  # {fits}
            $texts,
            threads={threads},
        ),
        ${fields}length=Duration({epochs}, "epochs"),
        schedule=Schedule(learning_rate=$rate, warmup=Duration(10, "percent")),
        mesh={mesh},
        cadence=Cadence(log_steps={log_steps}, save_steps={save_steps}),
        # $held_out: {held_out}.
        calibration={calibration},
        evaluations={evaluations},
    )
'''
)
_ON_A_TOWER = {
    "summary": """{name}: a text tower and a HET-XL head on a locked image tower, for {count:,} image-text pairs.

Written by lit-het new for {devices}.""",
    "constants": "TOWER = {tower}\n",
    "before": """\
    tower = load_config(TOWER)  # its images were preprocessed in the same way
    image_tower = {image_tower}
""",
    "task": """ContrastiveConfig(
            image_tower=image_tower,  # locked: the text tower and the head are trained
            text_tower=TextConfig(
                vocabulary_size={pieces},
                length={length},  # tokens of a caption
                embedding_size=image_tower.embedding_size,
                encoder={encoder},
                pooling="last",
            ),
            head=HetXLContrastiveConfig(),  # DeterministicContrastiveConfig() learns no noise
            loss=SoftmaxLoss(label_smoothing=0.1),  # or SigmoidLoss(), with initial_bias=-10.0 in the head
            text_members=1,  # 3 predict better, for three times the time of a text tower
        )""",
    "images": "image_size=image_tower.image_size",
    "texts": "captions={captions},\n            preprocessing=tower.data.preprocessing",
    "fields": "tokenizer={tokenizer},\n        pretrained=PretrainedConfig(run=TOWER),\n        ",
    "rate": "1e-3",
    "held_out": "Calibrated and evaluated on, but not trained on",
}
_IMPORTS = {
    "configs.experiment": "ExperimentConfig, PretrainedConfig",
    "data_pipelines.data_config": "LoaderConfig",
    "data_pipelines.labels": "CaptionWords, ClassIndex",
    "data_pipelines.shards.portions": "Portion",
    "data_pipelines.texts.tokenizers": "SentencePieceConfig",
    "eval.sets": "ImageSet",
    "eval.suite": "RetrievalConfig, ZeroShotConfig",
    "heads.contrastive": "HetXLContrastiveConfig",
    "heads.deterministic": "DeterministicConfig",
    "losses.classification": "SigmoidCrossEntropy, SoftmaxCrossEntropy",
    "losses.contrastive": "SoftmaxLoss",
    "sharding": "MeshConfig",
    "tasks.classification": "ClassificationConfig",
    "tasks.contrastive": "ContrastiveConfig",
    "towers.sizes": "encoder_size",
    "towers.text": "TextConfig",
    "towers.transformer": "EncoderConfig",
    "towers.tuning_config": "LoRA, Tuning",
    "towers.vit": "ViTConfig",
    "training.cadence": "Cadence",
    "training.directory": "load_config, tokenizer_path",
    "training.durations": "Duration",
    "training.optimizers_config": "AdamW, Optimizer",
    "training.schedules": "Schedule",
}


def new_project(
    project: Path,
    tower: str | None,
    shards: str,
    captions: str,
    image_size: int | None = None,
    adapt: str | None = None,
) -> None:
    """Writes a folder with a configuration to train on one's own image-text pairs, or on one's own classes.

    The folder holds ``config.py``, a tokenizer that is trained on the captions (unless the tower's run has one), and
    the tower, unless it is a run already.

    Args:
        project: the folder, which must not exist.
        tower: a run with an image tower, or an address for ``lit-het import``; None for a small classifier by the
            labels ``.cls`` or, where there are none, by words of the captions.
        shards: a folder, pattern or list of the pairs.
        captions: the member with the captions.
        image_size: of the tower, where its weights do not record it.
        adapt: how both towers of an image-text model are trained further, see `adapted.check_way`; None for a text
            tower on a locked image tower.
    """
    if project.exists():
        raise UserError(f"{project} already exists; choose another folder, or train with its config.py")
    member = member_of(captions) if tower else first_tower.labels_member(shards)
    index = _index(shards, member)
    count = len(index)
    try:
        with completed_folder(project) as partial:
            parts, fields = _ON_A_TOWER, {"name": project.name, **_shared_fields(shards, count)}
            if tower is None:
                parts = first_tower.PARTS
                fields |= first_tower.classifier_fields(partial, shards, member, image_size, fields["portions"])
            else:
                run = _tower(partial, tower, image_size)
                if adapt:
                    parts, fields = adapted.PARTS, fields | adapted.adapted_fields(adapt, Path(tower), load_config(run))
                fields |= _fields(partial, run, shards, index, captions, fields)
            if fields["portions"] is None:
                message(f"{count:,} pairs are too few to hold some out: nothing is calibrated or evaluated")
            config = _fitting(partial / "config.py", _CONFIGURATION.substitute(parts), fields, count)
    except OSError as error:
        raise UserError(f"{project} cannot be written ({error.strerror}); choose another folder") from error
    what = "pairs" if tower else "images"
    message(f"{count:,} {what}, batches of {config.data.batch_size}; next: lit-het train --config {project}/config.py")


def _index(shards: str, member: str) -> ShardIndex:
    addresses = expand(shards)
    with Bar("indexing", len(addresses), "shards") as bar:
        index = ShardIndex(addresses, [IMAGE, member], advance=bar.advance)
    if not len(index):
        raise UserError(f"{shards}: no sample has an image and a .{member}; name the member with --captions")
    faults = sum(fault.count for summary in index.summaries for fault in summary.faults)
    if faults:
        message(
            f"{faults:,} samples cannot be used: lit-het data check lists them, --data.max-bad-fraction allows them"
        )
    return index


def _tower(partial: Path, tower: str, image_size: int | None) -> Path:
    """Returns the run of the tower; weights of other libraries are imported into the project."""
    if checkpoint_dir(Path(tower)).is_dir():
        return Path(tower).resolve()
    import_weights(tower, partial / "tower", ImportOptions(image_size=image_size))
    return partial / "tower"


def _shared_fields(shards: str, count: int) -> dict[str, Any]:
    """Returns the parts of the configuration that depend on the number of samples alone."""
    _, encoder, size, epochs = next(row for row in _SIZES if row[0] is None or count <= row[0])
    start = next((start for start in (98, 87) if count * (100 - start) // 100 >= EXPECTED_IMAGES), None)
    return {
        "count": count,
        "shards": json.dumps(absolute(shards)),
        "encoder": encoder,
        "most_pieces": size,
        "epochs": epochs,
        "threads": min(16, os.cpu_count() or 1),
        "portions": _portions(start, "sample") if start else None,
        "start": start,
        "held_out": f"{100 - start} %, by a hash of their shard and key"
        if start
        else f"nothing, as {count:,} pairs are few",
    }


def _portions(start: int, rule: Rule) -> tuple[str, str]:
    """Returns the portions to train on and to hold out, as Python."""
    return f'Portion(0, {start}, by="{rule}")', f'Portion({start}, by="{rule}")'


def _fields(
    partial: Path, tower: Path, shards: str, index: ShardIndex, captions: str, shared: dict[str, Any]
) -> dict[str, Any]:
    """Returns the parts of the configuration that depend on the tower and the data; trains a tokenizer for it."""
    source = load_config(tower)
    image_tower, taken = "tower.task.bare().image_tower", source.tokenizer
    if source.task.require_image_tower().members == "apart":
        # A classifier's ensemble has an embedding of each member; a text is compared with one.
        image_tower = f'dataclasses.replace({image_tower}, members="mean")'
    if taken is None:
        path = partial / "tokenizer.model"
        pieces, length, cut = train_tokenizer([shards], [captions], shared["most_pieces"], path, seen_often=True)
        message(f"{pieces:,} pieces; {length} tokens cut {cut:.1%} of the captions")
        tokenizer = f'SentencePieceConfig(PROJECT / "tokenizer.model", length={length})'
    else:
        built = dataclasses.replace(taken, model=tokenizer_path(tower)).build()
        pieces, length = built.vocabulary_size, built.length
        tokenizer = "dataclasses.replace(tower.tokenizer, model=tokenizer_path(TOWER))"
    place, (portion, held_out) = json.dumps(captions), _held_out(source, index, captions, shared)
    retrieval = f'(RetrievalConfig(ImageSet("held_out", SHARDS, SHARDS, {portion}), captions={place}),)'
    return {
        "image_tower": image_tower,
        "tower": 'PROJECT / "tower"' if tower.parent == partial else f"Path({json.dumps(str(tower))})",
        "pieces": pieces,
        "length": length,
        "captions": place,
        "tokenizer": tokenizer,
        "calibration": portion,
        "held_out": held_out,
        "evaluations": retrieval if portion else "()",
    }


def _held_out(
    source: ExperimentConfig, index: ShardIndex, captions: str, shared: dict[str, Any]
) -> tuple[str | None, str]:
    """Returns the portion to hold out, as Python, and what it holds: by names, where there are enough to calibrate."""
    if not shared["portions"]:
        return None, shared["held_out"]
    # A tower of this data has not seen what it held out itself; of many captions, all would be read at each start.
    is_of_tower = _addresses([one.address for one in index.summaries]) & _addresses(source.data.shards)
    if is_of_tower or len(index) > MOST_SAMPLES:
        return shared["portions"][1], shared["held_out"]
    portion, counts, first = Portion(shared["start"], by="name"), index.counts, 0
    names, total = collections.Counter[bytes](), collections.Counter[bytes]()
    with Bar("counting names", len(counts), "shards") as bar:
        for shard, count in enumerate(counts):
            samples = range(first, first + count)
            goes_by, first = identities("name", index, shard, samples, TextPlace(captions)), samples.stop
            total.update(goes_by["caption"])
            names.update(itertools.compress(goes_by["caption"], portion.marks(*goes_by.values())))
            bar.advance(1)
    new, share = sum(names[name] == total[name] for name in names), (100 - shared["start"]) / 100
    # A name of many samples would leave too few for training.
    if new < LEAST_NAMES or names.total() > 1.5 * share * len(index):
        return shared["portions"][1], shared["held_out"]
    return _portions(shared["start"], "name")[1], f"{share:.0%}: half of it all samples of some captions"


def _addresses(shards: Sequence[str]) -> set[str]:
    """Returns the one spelling of the addresses of shards; none of those that are no longer there."""
    try:
        return {canonical(address) for address in expand(shards)}
    except UserError:
        return set()


def _fitting(path: Path, template: str, fields: dict[str, Any], count: int) -> ExperimentConfig:
    """Writes the configuration with the largest batch that fits into the memory of this machine's devices."""
    devices = jax.devices()
    is_cpu, memory = devices[0].platform == "cpu", _memory_per_device()
    # At least 20 steps an epoch, or of few samples 4, as a pair needs negatives; a CPU is slow at more.
    largest = min(128 if is_cpu else 16_384, max(count // 20, min(32, count // 4), 1))
    batch = max(len(devices), 1 << (largest.bit_length() - 1))
    while batch >= len(devices):
        for mesh in ("MeshConfig()", "MeshConfig(fsdp=-1)"):
            steps = max(1, count // batch)
            fields |= {"batch": batch, "mesh": mesh, "log_steps": min(50, steps), "save_steps": max(100, steps)}
            described = f"{len(devices)} {devices[0].device_kind}, {memory / 2**30:.1f} GiB each"
            fields |= {"devices": described, "fits": f"fits into {memory / 2**30:.1f} GiB, see lit-het plan"}
            imports = _imports(template.format(**fields, imports=""))
            path.write_text(template.format(**fields, imports=imports), "utf-8")
            config = load_module_config(path)
            if sum(Step(config, config.mesh.build()).memory().values()) <= _SHARE_OF_MEMORY * memory:
                return config
        batch //= 2
    raise UserError(
        f"no batch fits into {memory / 2**30:.1f} GiB per device; see lit-het plan, or take a smaller tower"
    )


def _memory_per_device() -> int:
    limits = jax.devices()[0].memory_stats() or {}
    return limits.get("bytes_limit") or psutil.virtual_memory().available // len(jax.devices())


def _imports(code: str) -> str:
    """Returns the imports of the names in a configuration."""
    used, lines = {*re.findall(r"\w+", code)}, []
    for module, names in sorted(_IMPORTS.items()):
        if found := [name for name in names.split(", ") if name in used]:
            lines.append(f"from lit_het.{module} import {', '.join(found)}")
    standard = [*(["import dataclasses"] if "dataclasses" in used else []), "from pathlib import Path"]
    return "\n".join([*standard, "", *lines])
