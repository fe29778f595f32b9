"""What the configuration of a task says of it: runs, plans and commands ask every task the same questions."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from lit_het.errors import UserError
from lit_het.heads.classification_config import TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.objectives.base import Objective, Setup, among_fields, check_objectives
from lit_het.programs import shared
from lit_het.towers.base import TowerOptions
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ImageTowerConfig
from lit_het.towers.tuning_config import Tuning
from lit_het.types import Params

if TYPE_CHECKING:
    from lit_het.tasks.writing import WritingTask


class TaskOptions:
    """A task without texts, labels and objectives; configurations are frozen dataclasses that replace what they need.

    Attributes:
        image_tower, text_tower: configurations of the towers; None where there is none.
        temperature_gradient: how held-out rows train τ; None without them.
        num_classes: of a classifier; None of another model.
        mask_classes: of a model that predicts masks of images; None of another model.
        writes_text: whether a decoder writes text about what is read.
        embeds_texts: whether images are compared with texts.
        takes_members: whether an image may have several embeddings, of members of its tower.
        calibrated_on: what temperatures are fitted to after training; None where that is done by hand.
        summary: what the model is, as a model card begins.
        pipeline_tag: its name on the Hugging Face Hub.
        exports: formats of ``lit-het export``.
        locked: patterns of parameters to lock.
        text_members: text towers with heads of their own.
        head, loss: their configurations; None where a task has none that others ask.
    """

    image_tower = text_tower = temperature_gradient = num_classes = mask_classes = None
    # Without a value: configurations have fields of these names, some without a default.
    head: Any
    loss: Any
    locked: Any = ()
    text_members: Any = 1
    writes_text = embeds_texts = takes_members = False
    calibrated_on: Literal["captions", "labels"] | None = None
    summary: Any
    pipeline_tag: str
    exports: tuple[str, ...] = ("lit-het", "huggingface", "onnx", "npz")

    def __post_init__(self) -> None:
        check_objectives(Setup(self))

    @property
    def towers(self) -> dict[str, TowerOptions]:
        """The towers that there are, by the names of the fields."""
        both = {"image_tower": self.image_tower, "text_tower": self.text_tower}
        return {name: tower for name, tower in both.items() if tower is not None}

    @property
    def sources(self) -> Mapping[str, Path]:
        """The runs whose parts, beside towers, are parts of the model, by the name of the part."""
        return {}

    @property
    def tunings(self) -> dict[str, Tuning]:
        """What is trained of towers, by their names; without those of which all is that ``locked`` does not lock."""
        return {part: tower.tuning for part, tower in self.towers.items() if tower.tuning is not None}

    @property
    def tuning_locks(self) -> tuple[str, ...]:
        """Patterns of the parameters that the tuning of towers does not train."""
        towers, tunings = self.towers, self.tunings
        of_parts = {part: tuning.locked(towers[part].first_parameters) for part, tuning in tunings.items()}
        return tuple(f"{part}/{pattern}" for part, patterns in of_parts.items() for pattern in patterns)

    @property
    def locked_patterns(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not trained: those of ``locked``, and of the tuning of towers."""
        return (*self.locked, *self.tuning_locks)

    def untuned(self) -> Any:
        """Returns the task whose towers have no tuning, as which a trained model is used; itself if none has."""
        towers: dict[str, Any] = self.towers
        plain = {part: dataclasses.replace(towers[part], tuning=None) for part in self.tunings}
        return dataclasses.replace(self, **plain) if plain else self  # pyright: ignore[reportArgumentType]

    def untuned_params(self, params: Params) -> Params:
        """Returns the parameters of the task that is `untuned`."""
        return params | {part: tuning.plain(params[part]) for part, tuning in self.tunings.items() if part in params}

    def bare(self) -> Any:
        """Returns the task of the trained model alone: with whole towers, nothing locked, nothing trained beside."""
        plain = self.untuned()
        towers = {part: dataclasses.replace(one, weights=None) for part, one in plain.towers.items() if one.weights}
        beside = {*self.objectives, "temperature_gradient"}
        absent = {field.name: field.default for field in dataclasses.fields(plain) if field.name in beside}
        return dataclasses.replace(plain, **towers, **absent, locked=())

    @property
    def reads(self) -> Literal["image", "text"]:
        """What the model is given; so begin the names of its tower and of metrics."""
        return "text" if self.image_tower is None else "image"

    @property
    def objectives(self) -> dict[str, Objective]:
        """What is trained beside the task's own loss, by the names of the fields."""
        return among_fields(self)

    @property
    def compute_type(self) -> ComputeType:
        """The type of activations, in which locked parameters are held."""
        return self.require_image_tower().compute_type

    def require_image_tower(self) -> ImageTowerConfig:
        """Returns the image tower."""
        if self.image_tower is None:
            raise UserError("the model has no image tower: it translates texts, see lit-het translate")
        return self.image_tower

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Raises a `UserError` if data do not fit the model, before anything is compiled.

        Args:
            run: configuration of the run.
            loader: of its data.
            tokenizer: of texts; None without.
        """
        if self.image_tower is not None and run.data.image_size != self.image_tower.image_size:
            raise UserError(
                f"--data.image-size {run.data.image_size} differs from --task.image-tower.image-size "
                f"{self.image_tower.image_size}; make them equal"
            )
        if self.image_tower is not None and run.data.preprocessing.patches != (patches := self.image_tower.patches):
            raise UserError(
                f"the image tower takes {patches or 'squares'} of an image, and the data have "
                f"{run.data.preprocessing.patches or 'squares'}; set data.preprocessing.patches to {patches!r}"
            )
        check_objectives(Setup(self, run=run, tokenizer=tokenizer, loader=loader))

    def check_copies(self, batch_size: int, num_samples: int) -> str | None:
        """Returns what copies of a sample in a batch do to the loss; None if nothing."""

    def check_stored(self, stored: Any) -> None:
        """Raises a `UserError` if stored embeddings cannot replace what a tower reads."""

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of one example of a batch, by the fields of `Batch`, for plans.

        Args:
            data: configuration of the loader.
        """
        found = {}
        for objective in self.objectives.values():
            found |= objective.columns(self)
        if self.image_tower is None:
            return found
        if data.embeddings is not None:
            from lit_het.tasks.features import FeatureExtractor

            stored = jax.ShapeDtypeStruct((FeatureExtractor(self.image_tower).size,), jnp.float32)
            return found | {"image_embedding": stored}
        shape = data.preprocessing.shape(self.image_tower.image_size)
        return found | {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}

    def largest_array(self, rows: int, batch_size: int) -> int:
        """Returns the numbers of the largest array of the loss or an objective, which exists three times, for plans.

        Args:
            rows: examples on a device.
            batch_size: on all devices.
        """
        # One after the other: the largest counts.
        terms = (objective.largest_array(self, rows, batch_size) for objective in self.objectives.values())
        return max(self.logits_at_once(rows, batch_size), *terms, 0)

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the numbers of the largest array of the task's own loss, see `largest_array`."""
        raise NotImplementedError

    def decoder_beside(self) -> Any:
        """Returns the configuration of the model that writes text with this one's image tower; None without one."""


def check_text_tower(tower: Any, tokenizer: Any) -> None:
    """Raises a `UserError` if a text tower does not have the length of a tokenizer, and its tokens."""
    if tokenizer.length != tower.length or tokenizer.vocabulary_size > tower.vocabulary_size:
        raise UserError(
            f"the tokenizer has length {tokenizer.length} and {tokenizer.vocabulary_size} tokens, the text tower has "
            f"length {tower.length} and {tower.vocabulary_size} tokens; set --tokenizer.length and "
            "--task.text-tower.length, or --task.text-tower.vocabulary-size"
        )


def check_padding(tower: Any, tokenizer: Any) -> None:
    """Raises a `UserError` if a text tower masks another token than that which fills the texts of a tokenizer."""
    if tower.masked_token not in (None, tokenizer.padding_id):
        raise UserError(
            f"the text tower masks token {tower.masked_token} as padding, but the tokenizer pads with "
            f"{tokenizer.padding_id}; set --tokenizer.padding-id {tower.masked_token}"
        )


def text_columns(length: int, *, with_targets: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the columns of texts of so many tokens, with the hashes of both sides."""
    hashes = jax.ShapeDtypeStruct((2,), jnp.uint32)
    targets = {"text_target": jax.ShapeDtypeStruct((length,), jnp.bool_)} if with_targets else {}
    return {"text": jax.ShapeDtypeStruct((length,), jnp.int32), "image_id": hashes, "text_id": hashes, **targets}


class WritingOptions(TaskOptions):
    """A task of a tower and a decoder, which writes text about what the tower reads.

    Attributes:
        shared_embedding: whether tower and decoder have one embedding of tokens.
        microbatches: number of parts in which the tower processes a batch.
        tower_key: name of the tower's random key in training.
    """

    decoder: DecoderConfig
    head: TokenHeadConfig
    loss: SoftmaxCrossEntropy
    shared_embedding = False
    microbatches = 1
    tower_key: str

    writes_text = True

    @property
    def tower(self) -> Any:
        """The tower that reads."""
        return self.text_tower if self.image_tower is None else self.image_tower

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks the size of images, and the tokenizer and the prompts of texts, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        self.decoder.check_tokenizer(tokenizer, run.data.prompt, "--task.decoder")

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of images and texts, see `TaskOptions`."""
        return super().columns(data) | text_columns(self.decoder.length, with_targets=True)

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the size of a block of logits of tokens, see `TaskOptions`."""
        from lit_het.objectives.tokens import token_logits_at_once

        return token_logits_at_once(self.decoder, self.head, rows)

    @shared
    def build(self) -> "WritingTask":
        """Returns the task."""
        from lit_het.tasks.writing import WritingTask

        return WritingTask(self)
