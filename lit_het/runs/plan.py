"""``lit-het plan``: memory and operations of a training step on N devices, without the devices."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lit_het import parameters, sharding
from lit_het.configs.experiment import ExperimentConfig
from lit_het.durations import RunLength
from lit_het.losses.distillation import VECTORS_PER_BLOCK
from lit_het.planning import costs
from lit_het.planning.program import Program, memory_bytes, read_program
from lit_het.random import Keys, keys_at
from lit_het.tasks.base import DistillingTask
from lit_het.tasks.captioner import CaptionerConfig, tokens_per_block
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.patch_sizes import losses
from lit_het.tasks.translation import TranslationConfig
from lit_het.tasks.union import compute_type_of
from lit_het.towers.dispatch import DISPATCH
from lit_het.training.step import initial_state, jit_step, make_train_step
from lit_het.types import Batch, Metrics, Params, TrainState

# Arrays of the size of a block of logits: the logits, their probabilities and their gradient.
_COPIES_OF_LOGITS = 3
# The number of steps does not change the cost of a step.
_ANY_LENGTH = RunLength(num_steps=10**9, batch_size=1, epoch_size=1)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step of one device.

    Attributes:
        arguments: bytes of state, locked parameters and batch per device.
        temporary: bytes of intermediate values per device.
        program: its matrix products and collectives.
        seconds: compile time.
    """

    arguments: int
    temporary: int
    program: Program
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations and collectives of a training step.

    Attributes:
        mesh: of the devices.
        batch_size: number of examples on all devices.
        counts: parameters (locked, trainable) of each part of the model.
        flops: floating point operations of all matrix products of a step, on all devices together.
        dispatch_flops: those among them that move tokens to experts and back.
        memory: bytes per device by formula, by content.
        compiled: the step as compiled.
    """

    mesh: Mesh
    batch_size: int
    counts: dict[str, tuple[int, int]]
    flops: int
    dispatch_flops: int
    memory: dict[str, int]
    compiled: Compiled


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Shapes and shardings of the inputs of a step."""

    state: TrainState
    locked: Params
    batch: Batch


class Step:
    """The training step of a configuration, as shapes only: nothing is allocated."""

    def __init__(self, config: ExperimentConfig, mesh: Mesh):
        sharding.check_batch_size(config.data.batch_size, mesh)
        self.config, self.mesh = config, mesh
        self._task = config.task.build()
        # By patch size: the smallest patches cost most.
        self._losses = losses(config.task)
        self.optimizer = config.optimizer.build(
            config.schedule, _ANY_LENGTH, self._task.layers_above, self._task.learning_rates
        )
        locked, trainable = parameters.partition(self._task.shapes, self._task.locked)
        locked = jax.eval_shape(lambda params: parameters.cast(params, compute_type_of(config.task)), locked)
        averages = config.average_decay is not None
        state = jax.eval_shape(lambda params: initial_state(params, self.optimizer, averages=averages), trainable)
        self.inputs = _Inputs(self._placed(state), self._placed(locked), self._batch(config.data.batch_size))

    def _placed(self, tree: Any) -> Any:
        places = sharding.tree_shardings(tree, self.mesh)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    def _batch(self, rows: int) -> Batch:
        """Returns the shapes of a batch of ``rows`` examples."""
        place, task = sharding.batch_sharding(self.mesh), self.config.task

        def of(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=place)

        image = stored = source = None
        if isinstance(task, TranslationConfig):
            source = of(task.text_tower.length, dtype=jnp.int32)
        else:
            size = task.image_tower.image_size
            image, stored = of(size, size, 3, dtype=jnp.uint8), of(self._task.features.size, dtype=jnp.float32)
        is_stored = self.config.data.embeddings is not None
        suspects = self.config.data.suspects
        text = stored_text = target = ids = label = None
        if isinstance(task, ContrastiveConfig):
            if self.config.data.text_embeddings is not None:
                stored_text = of(task.text_tower.embedding_size + task.text_tower.input_size, dtype=jnp.float32)
            text, ids = of(task.text_tower.length, dtype=jnp.int32), of(2, dtype=jnp.uint32)
            target = None if task.captioner is None else of(task.text_tower.length, dtype=jnp.bool_)
        elif isinstance(task, CaptioningConfig | TranslationConfig):
            text, ids = of(task.decoder.length, dtype=jnp.int32), of(2, dtype=jnp.uint32)
            target = of(task.decoder.length, dtype=jnp.bool_)
        else:
            shape = task.loss.label_shapes(task.num_classes)[0]
            label = of(*shape, dtype=jnp.float32 if shape else jnp.int32)
        fields: Any = {
            "valid": of(dtype=jnp.bool_),
            "image": None if is_stored else image,
            "image_embedding": stored if is_stored else None,
            "source": source,
            "text": text,
            "text_embedding": stored_text,
            "text_target": target,
            "image_id": ids,
            "text_id": ids,
            "label": label,
            "weight": of(dtype=jnp.float32) if suspects is not None and suspects.weight else None,
        }
        return Batch(**fields)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns `Plan.counts`."""
        locked, trainable = self.inputs.locked, self.inputs.state.params
        return {
            part: (parameters.count(locked.get(part, {})), parameters.count(trainable.get(part, {})))
            for part in ("image_tower", "text_tower", "decoder", "captioner", "distillation", "head")
            if part in locked or part in trainable
        }

    def flops(self) -> tuple[int, int]:
        """Returns `Plan.flops` and `Plan.dispatch_flops`."""
        arguments = self.inputs.state.params, self.inputs.locked, self.inputs.batch
        with jax.set_mesh(self.mesh):  # the grouping of tokens for experts depends on the devices
            traced = jax.make_jaxpr(self._gradient)(*arguments).jaxpr
        return costs.traced_flops(traced), costs.traced_flops(traced, DISPATCH)

    def _gradient(self, trainable: Params, locked: Params, batch: Batch) -> Params:
        gradient_of, keys = self.config.gradient_of(_ANY_LENGTH), keys_at(self.config.seed, 0)
        if gradient_of is None:
            return jax.grad(self._loss)(trainable, locked, batch)

        def loss(trainable: Params, batch: Batch, keys: Keys) -> tuple[Any, Metrics]:
            return self._loss(trainable, locked, batch), {}

        return gradient_of(loss, trainable, batch, keys, jnp.int32(0))[1]

    def _loss(self, trainable: Params, locked: Params, batch: Batch) -> Any:
        params, keys = parameters.merge(locked, trainable), keys_at(self.config.seed, 0)
        loss = (*self._losses, self._task.loss)[0](params, batch, keys)[0]
        if self.config.distillation is not None:  # as from the step on where its losses begin
            assert isinstance(self._task, DistillingTask)
            loss = loss + self._task.distillation_loss(params, params, batch, keys)[0]
        return loss

    def memory(self) -> dict[str, int]:
        """Returns `Plan.memory`."""
        params, locked = self.inputs.state.params, self.inputs.locked
        rows = self.config.data.batch_size // sharding.num_batch_shards(self.mesh)
        values = costs.intermediate_bytes(self._loss, params, lambda rows: (locked, self._batch(rows)), rows)
        return {
            "trainable parameters": _bytes_per_device(params),
            "optimizer state": _bytes_per_device(dataclasses.replace(self.inputs.state, params={})),
            "locked parameters": _bytes_per_device(locked),
            "batch": _bytes_per_device(self.inputs.batch),
            "gradients": _bytes_per_device(params),
            "saved for the backward pass": values.saved,
            "peak of temporary values": values.working,
            "gathered kernels": _gathered(params, locked),
            "logits and keys": self._logits(rows),
        }

    def _logits(self, rows: int) -> int:
        """Returns the bytes of a block of logits, its copies, and the keys of other devices."""
        task, item = self.config.task, jnp.dtype(jnp.float32).itemsize
        if isinstance(task, CaptioningConfig | TranslationConfig):
            return _token_logits(task, rows) * item
        if not isinstance(task, ContrastiveConfig):
            return class_logits(task.head, rows, task.num_classes) * item
        all_rows, width = self.config.data.batch_size, task.image_tower.embedding_size
        num_keys = rows if task.loss.form == "ring" else all_rows
        vectors = rows if task.loss.form == "dense" else min(rows, task.loss.block_size)
        # Keys of images and texts, and the gradient of the keys of the current block.
        pairs = (_COPIES_OF_LOGITS * vectors + 3 * width) * num_keys
        tokens = 0 if task.captioner is None else _token_logits(task.captioner, rows)
        prototypes = 0 if task.distillation is None else VECTORS_PER_BLOCK * task.distillation.num_prototypes
        # One loss after the other: the largest counts.
        return max(pairs, tokens, _COPIES_OF_LOGITS * prototypes) * item

    def compile(self) -> Compiled:
        """Compiles the step for the devices of the mesh without allocating memory on them."""
        began = time.monotonic()
        config = self.config
        step = make_train_step(
            self._task,
            self.optimizer,
            config.seed,
            config.average_decay,
            gradient_of=config.gradient_of(_ANY_LENGTH),
            distilled_from=None if config.distillation is None else 0,
            skips_nonfinite=config.on_nonfinite == "skip",
            signal_to_noise=config.optimizer.signal_to_noise,
            losses=self._losses,
        )
        inputs = self.inputs
        with jax.set_mesh(self.mesh):
            compiled = jit_step(step, inputs.state).lower(inputs.state, inputs.locked, inputs.batch).compile()
        (arguments, temporary), text = memory_bytes(compiled), compiled.as_text()
        assert text is not None
        return Compiled(arguments, temporary, read_program(text, self.mesh), time.monotonic() - began)


def plan(config: ExperimentConfig, devices: Sequence[Any]) -> Plan:
    """Returns the plan of a configuration for devices; nothing is run on them.

    Raises:
        UserError: the mesh does not fit the devices, or the batch the mesh.
    """
    step = Step(config, config.mesh.build(devices))
    compiled = step.compile()
    return Plan(step.mesh, config.data.batch_size, step.counts(), *step.flops(), step.memory(), compiled)


def class_logits(head: Any, rows: int, num_classes: int) -> int:
    """Returns how many numbers a block of logits of a classification head and its copies hold.

    Args:
        head: configuration of the head.
        rows: examples on a device.
        num_classes: k.
    """
    block = head.sampling
    vectors = rows if block is None else min(block.block_size, rows * block.num_samples)
    return _COPIES_OF_LOGITS * vectors * num_classes


def _token_logits(config: CaptioningConfig | TranslationConfig | CaptionerConfig, rows: int) -> int:
    """Returns the same for the tokens of texts."""
    tokens, size = rows * config.decoder.length, config.decoder.vocabulary_size
    return class_logits(config.head, tokens if config.head.sampling else tokens_per_block(tokens, size), size)


def _bytes_per_device(tree: Any) -> int:
    """Returns the bytes of a tree on each device."""
    return sum(sharding.shard_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _gathered(trainable: Params, locked: Params) -> int:
    """Returns the bytes of sharded kernels that a device gathers: all outside of stacks, and one block of a stack."""
    outside, largest_block = 0, 0
    for tree in (trainable, locked):
        blocks: dict[str, int] = {}
        for path, leaf in parameters.flatten(tree).items():
            size = sharding.used_bytes(leaf)
            if size == sharding.shard_bytes(leaf):  # not sharded
                continue
            if "blocks/" in path:
                stack = path.rpartition("blocks/")[0]
                blocks[stack] = blocks.get(stack, 0) + size // leaf.shape[0]
            elif tree is trainable:
                outside += size
        largest_block = max(largest_block, *blocks.values(), 0)
    return outside + largest_block
