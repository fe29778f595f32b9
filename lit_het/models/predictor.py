"""Trained models for evaluators: compiled once, with images sharded over the devices of a mesh."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lit_het import distributed, sharding
from lit_het.calibrations import Calibration
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, Tokenizer
from lit_het.errors import UserError
from lit_het.heads.sampling import in_pairs
from lit_het.models.writer import Writer
from lit_het.programs import shared
from lit_het.tasks.base import AnyTask
from lit_het.tasks.quantities import Quantity
from lit_het.texts import SourceTexts
from lit_het.types import ImageFeatures, Knows, Params, TextEncoder

# Of a function; each has its own program.
_MOST_SHAPES = 16


@shared
def _compiled(task: AnyTask, mesh: Mesh) -> dict[Hashable, tuple[Any, set[Hashable]]]:
    """Returns the compiled functions of a task by their keys: a model that is opened again compiles nothing again."""
    return {}


class Programs:
    """A task's computations, compiled for the devices of a mesh; models with other parameters share them.

    Args:
        task: the task.
        mesh: devices that hold the parameters.
        tokenizer: for captions; None for a classifier.
        prompts: what a decoder was given before texts in training.
    """

    def __init__(self, task: AnyTask, mesh: Mesh, tokenizer: Tokenizer | None, prompts: Sequence[str] = ()):
        # What writes or embeds texts has more than every task.
        self.task: Any = task
        self._mesh, self._tokenizer, self._prompts = mesh, tokenizer, prompts
        self._compiled = _compiled(task, mesh)
        beside = task.config.decoder_beside()
        # Of the decoder of an image-text model, which reads the tokens of images.
        self._decoder = None if beside is None else Programs(beside.build(), mesh, tokenizer, prompts)

    def model(
        self,
        params: Params,
        tower: str,
        text_tower: str = "",
        calibration: Calibration | None = None,
        knows: Knows | None = None,
    ) -> "Model":
        """Returns the model with these parameters.

        Args:
            params: parameters of all parts.
            tower: key of the image tower; equal for equal towers.
            text_tower: key of everything that embeds texts; empty during training.
            calibration: fitted temperatures; None during training.
            knows: names of training captions; None if they are unknown.
        """
        features, text = self._features(params, tower), self._text_encoder(params, text_tower, knows)
        return Model(self, params, features, text, calibration)

    def quantity(
        self,
        quantity: Quantity,
        params: Params,
        blocks: Float[np.ndarray, "n b f"],
        seeds: Int[np.ndarray, " n"] | None,
        classes: Float[np.ndarray, "k d"] | None,
        num_samples: int,
    ) -> np.ndarray:
        """Computes a quantity of all images; the blocks are sharded over the devices."""
        arguments = self._arguments(params, blocks, seeds, classes)
        found = self._call(quantity, self._of_blocks(quantity), *arguments, num_samples=num_samples)
        return np.concatenate(np.asarray(found))

    def program_bytes(
        self,
        quantity: Quantity,
        params: Params,
        block_size: int,
        num_samples: int,
        classes: Float[np.ndarray, "k d"] | None,
    ) -> int:
        """Returns the memory of the program of a quantity, see `Model.program_bytes`."""
        # Here, since training loads this module and plans nothing.
        from lit_het.planning.program import memory_bytes

        shards = sharding.num_batch_shards(self._mesh)
        blocks = np.zeros((shards, block_size, self.task.features.size), np.float32)
        arguments = self._arguments(params, blocks, np.zeros(shards, np.int32), classes)
        program, _ = self._program(quantity, self._of_blocks(quantity), "num_samples")
        with jax.set_mesh(self._mesh):
            return sum(memory_bytes(program.lower(*arguments, num_samples=num_samples).compile()))

    def writer(self, params: Params, tower: str, calibration: Calibration | None = None) -> Writer | None:
        """Returns the decoder with these parameters; None for a model without one.

        Args:
            params: of all parts.
            tower: key of the image tower.
            calibration: fitted temperatures; those of an image-text model are not of tokens, and not applied.
        """
        if self._decoder is not None:
            of_decoder = self.task.config.decoder_params(params, self._decoder.task.shapes)
            return self._decoder.writer(of_decoder, f"tokens of {tower}")
        if not self.task.config.writes_text:
            return None
        assert isinstance(self._tokenizer, SentencePieceTokenizer), "checked in training"

        def call(key: Hashable, function: Callable[..., Any], params: Params, rows: Any, *shared: Any) -> Any:
            return jax.tree.map(np.asarray, self._call(key, function, params, self._split(rows), *shared))

        if self.task.config.reads == "text":
            source = SourceTexts(distributed.gather_rows, sharding.num_batch_shards(self._mesh), tower)
        else:
            source = self._features(params, tower)
        return Writer(self.task, params, source, self._tokenizer, self._prompts, call, calibration)

    def _of_blocks(self, quantity: Quantity) -> Callable[..., jax.Array]:
        def all_blocks(params: Params, classes: Any, rows: Any, num_samples: int) -> jax.Array:
            def one_block(rows: Any, shared: Any, _: tuple[str, ...]) -> jax.Array:
                (block,), seeds = rows
                noise = () if seeds is None else (jax.random.key(seeds[0]), num_samples)
                return quantity(self.task.image_classifier(*shared), block, *noise)

            # Full precision: the division by τ would amplify rounding errors of the products.
            with jax.default_matmul_precision("highest"):
                return sharding.map_shards(one_block, rows, (params, classes))

        return all_blocks

    def _arguments(self, params: Params, blocks: Any, seeds: Any, classes: Any) -> tuple[Params, Any, Any]:
        return params, sharding.place(classes, sharding.replicated(self._mesh)), self._split((blocks, seeds))

    def _features(self, params: Params, tower: str) -> ImageFeatures:
        def extract(view: np.ndarray) -> jax.Array:
            self.task.config.require_image_tower()
            return self._call("features", self.task.features, params, distributed.split_rows(view, self._mesh))

        of_tower, shards = self.task.features, sharding.num_batch_shards(self._mesh)
        num_members, mean_size = (1, None) if of_tower is None else (of_tower.num_members, of_tower.mean_size)
        return ImageFeatures(extract, num_members, shards, tower, mean_size)

    def _text_encoder(self, params: Params, tower: str, knows: Knows | None) -> TextEncoder | None:
        if not self.task.config.embeds_texts:
            return None
        encode_text, mean_text_key = self.task.encode_text, self.task.mean_text_key

        def embed(tokens: np.ndarray) -> np.ndarray:
            return np.asarray(self._call("text", encode_text, params, self._split(tokens)))

        def join(prompts: np.ndarray) -> np.ndarray:
            return np.asarray(self._call("prompts", mean_text_key, params, self._split(prompts)))

        variances = self.task.config.head.text_variances
        return TextEncoder(embed, self._tokenizer or _no_tokenizer, join, tower, variances, knows)

    def _split(self, rows: Any) -> Any:
        shards = sharding.num_batch_shards(self._mesh)
        is_even = not jax.tree.leaves(rows)[0].shape[0] % shards
        return sharding.place(rows, sharding.batch_sharding(self._mesh) if is_even else sharding.replicated(self._mesh))

    def _call(self, key: Hashable, function: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """Runs a function that is compiled once per key; the result is replicated on all devices and processes."""
        program, used = self._program(key, function, *static)
        # Each number of labels has a program of several MB: a demo that is long open would fill the memory.
        used.add((*static.items(), *map(np.shape, jax.tree.leaves(arguments[1:]))))  # behind the parameters
        if len(used) > _MOST_SHAPES:
            program.clear_cache()
            used.clear()
        with jax.set_mesh(self._mesh):
            return program(*arguments, **static)

    def _program(self, key: Hashable, function: Callable[..., Any], *static: str) -> tuple[Any, set[Hashable]]:
        """Returns the compiled function of a key, and the shapes that it was compiled for."""
        if key not in self._compiled:
            replicated = sharding.replicated(self._mesh)
            self._compiled[key] = jax.jit(function, static_argnames=static, out_shardings=replicated), set()
        return self._compiled[key]


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model on the devices of a mesh, see `lit_het.types.EvaluatedModel`."""

    programs: Programs
    params: Params
    features: ImageFeatures
    text: TextEncoder | None
    calibration: Calibration | None = None

    @property
    def writer(self) -> Writer | None:
        """The decoder; None for other models."""
        return self.programs.writer(self.params, self.features.tower, self.calibration)

    @property
    def num_classes(self) -> int | None:
        """The number of a classifier's own classes; 0 without a head, None for an image-text model."""
        # The head of an image-text model may have no parameters.
        is_headless = self.text is None and "head" not in self.params
        return 0 if is_headless else self.programs.task.num_classes

    @property
    def mask_classes(self) -> int | None:
        """The number of classes of masks, without void; None of a model that predicts none."""
        return self.programs.task.config.mask_classes

    @property
    def num_predictions(self) -> int:
        """The number of predictions of an image without noise: of members of its tower, and of their heads."""
        return self.programs.task.num_predictions

    @property
    def has_noise(self) -> bool:
        """Whether the head has noise for images."""
        return self.programs.task.has_image_noise

    @property
    def has_class_probabilities(self) -> bool:
        """Whether the loss gives every class, or pair of image and text, a probability of its own."""
        return self.programs.task.config.loss.has_class_probabilities

    def check_samples(self, num_samples: int) -> None:
        """Checks a number of noise samples, see `lit_het.types.EvaluatedModel`."""
        if self.has_noise:
            in_pairs(self.programs.task.antithetic, num_samples)

    def __call__(
        self,
        quantity: Quantity,
        blocks: Float[np.ndarray, "n b f"],
        *,
        seeds: Int[np.ndarray, " n"] | None = None,
        num_samples: int = 0,
        classes: Float[np.ndarray, "k d"] | None = None,
    ) -> np.ndarray:
        """Computes a quantity of all images, see `lit_het.types.EvaluatedModel`."""
        if self.num_classes == 0:
            raise UserError(
                "the model has no classes (an imported image tower, or a decoder); only its features can be evaluated"
            )
        found = self.programs.quantity(quantity, self.params, blocks, seeds, classes, num_samples)
        if np.isnan(found).any():
            raise UserError(
                "predictions of the model are not finite: its variances or embeddings overflow; take an earlier "
                "checkpoint, or train it with less noise"
            )
        return found

    def program_bytes(
        self, quantity: Quantity, block_size: int, num_samples: int, classes: Float[np.ndarray, "k d"] | None
    ) -> int:
        """Returns the bytes of the program of a quantity on each device: arguments, intermediate values and result.

        Args:
            quantity: one with noise.
            block_size: images on each device.
            num_samples: S; 0 leaves the noise out.
            classes: unit embeddings of class names, for image-text models.
        """
        return self.programs.program_bytes(quantity, self.params, block_size, num_samples, classes)


def _no_tokenizer(captions: list[str]) -> np.ndarray:
    raise UserError("the run has no tokenizer; import it again with --tokenizer FILE")
