"""``lit-het plan``: memory and operations of a training step on N devices, without the devices."""

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lit_het import parameters, sharding
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.errors import UserError
from lit_het.planning import costs
from lit_het.planning.program import Program, memory_bytes, read_program
from lit_het.random import keys_at
from lit_het.tasks.base import Progress
from lit_het.towers.dispatch import DISPATCH
from lit_het.training.build import build
from lit_het.training.durations import RunLength
from lit_het.training.step import initial_state, jit_step
from lit_het.types import Batch, Params, TrainState

COPIES_OF_LOGITS = 3
"""Arrays of the size of a block of logits: the logits, their probabilities and their gradient."""

# The number of steps does not change the cost of a step.
_ANY_LENGTH = RunLength(num_steps=10**9, batch_size=1, epoch_size=1)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step of one device.

    Attributes:
        arguments: bytes of state, locked parameters and batch per device.
        temporary: bytes of intermediate values per device.
        code: bytes of the program on the device.
        text: the program as XLA prints it; empty if it needs more memory than the device has.
        program: what it computes and moves.
        seconds: compile time.
    """

    arguments: int
    temporary: int
    code: int
    text: str
    program: Program
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations and collectives of a training step.

    Attributes:
        mesh: of the devices.
        batch_size: number of examples on all devices.
        counts: parameters (locked, trainable) of each part of the model.
        flops: floating point operations of the matrix products of a step, on all devices together; what the backward
            pass computes again does not count.
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
        self._task, self.optimizer, self._losses, self._gradients, self._step = build(config, _ANY_LENGTH, at_end=True)
        locked, trainable = parameters.partition(self._task.shapes, self._task.locked)
        locked = jax.eval_shape(lambda params: parameters.cast(params, config.task.compute_type), locked)
        averages = config.average_decay is not None
        state = jax.eval_shape(lambda params: initial_state(params, self.optimizer, averages=averages), trainable)
        self.inputs = _Inputs(self._placed(state), self._placed(locked), self._batch(config.data.batch_size))

    def _placed(self, tree: Any) -> Any:
        places = sharding.tree_shardings(tree, self.mesh)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    def _batch(self, rows: int) -> Batch:
        """Returns the shapes of a batch of ``rows`` examples."""
        place, data = sharding.batch_sharding(self.mesh), self.config.data
        columns = {"valid": jax.ShapeDtypeStruct((), jnp.bool_), **self.config.task.columns(data)}
        if data.suspects is not None and data.suspects.weight:
            columns["weight"] = jax.ShapeDtypeStruct((), jnp.float32)
        of_rows: Any = {
            name: jax.ShapeDtypeStruct((rows, *one.shape), one.dtype, sharding=place) for name, one in columns.items()
        }
        return Batch(**of_rows)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns `Plan.counts`."""
        locked, trainable = self.inputs.locked, self.inputs.state.params
        return {
            part: (parameters.count(locked.get(part, {})), parameters.count(trainable.get(part, {})))
            for part in ("image_tower", "text_tower", "decoder", *self.config.task.objectives, "head", "oracle")
            if part in locked or part in trainable
        }

    def flops(self) -> tuple[int, int]:
        """Returns `Plan.flops` and `Plan.dispatch_flops`."""
        with jax.set_mesh(self.mesh):  # the grouping of tokens for experts depends on the devices
            traced = jax.make_jaxpr(self._gradient)(self.inputs.state, self.inputs.locked, self.inputs.batch).jaxpr
        return costs.traced_flops(traced), costs.traced_flops(traced, DISPATCH)

    def _gradient(self, state: TrainState, locked: Params, batch: Batch) -> Params:
        # At the first of several patch sizes: the smallest patches cost most.
        return self._gradients[0](state, locked, batch, keys_at(self.config.seed, 0))[1]

    def _loss(self, trainable: Params, locked: Params, batch: Batch) -> Any:
        params = parameters.merge(locked, trainable)
        return self._losses[0](params, batch, keys_at(self.config.seed, 0), Progress(jnp.int32(0), params))[0]

    def memory(self) -> dict[str, int]:
        """Returns `Plan.memory`."""
        params, locked = self.inputs.state.params, self.inputs.locked
        rows = self.config.data.batch_size // sharding.num_batch_shards(self.mesh)
        largest = self.config.task.largest_array(rows, self.config.data.batch_size)
        values = costs.intermediate_bytes(self._loss, params, lambda rows: (locked, self._batch(rows)), rows)
        gradients, logits = _bytes_per_device(params), COPIES_OF_LOGITS * largest * jnp.dtype(jnp.float32).itemsize
        return {
            "trainable parameters": _bytes_per_device(params),
            "optimizer state": _bytes_per_device(dataclasses.replace(self.inputs.state, params={})),
            "locked parameters": _bytes_per_device(locked),
            "batch": _bytes_per_device(self.inputs.batch),
            "saved for the backward pass": values.saved,
            # In proportion to the parameters, which are split over devices.
            "saved kernels": values.kernels * gradients // max(1, costs.tree_bytes(params)),
            "gathered kernels": _gathered(params, locked),
            "gradients": gradients,
            # One after the other: the peak of the forward pass, the logits, and gradients beside the backward pass.
            "further temporary values": max(values.backward + gradients, values.forward, logits) - gradients,
        }

    def compile(self) -> Compiled:
        """Compiles the step for the devices of the mesh without allocating memory on them."""
        began = time.monotonic()
        inputs = self.inputs
        with jax.set_mesh(self.mesh):
            lowered = jit_step(self._step, inputs.state).lower(inputs.state, inputs.locked, inputs.batch)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            arguments = sum(_bytes_per_device(tree) for tree in (inputs.state, inputs.locked, inputs.batch))
            temporary = max(0, memory_needed(error) - arguments)
            return Compiled(arguments, temporary, 0, "", Program((), (), (), 0), time.monotonic() - began)
        (arguments, temporary), text = memory_bytes(compiled), compiled.as_text()
        assert text is not None
        program = read_program(text, sharding.of_one_slice(self.mesh))
        memory = compiled.memory_analysis()
        code = memory.generated_code_size_in_bytes
        if self.mesh.devices.flat[0].platform == "tpu":
            # For TPUs the sum of intermediate values counts memory twice that several of them take in turn.
            temporary = min(temporary, memory.peak_memory_in_bytes - arguments)
        return Compiled(arguments, temporary, code, text, program, time.monotonic() - began)


def memory_needed(error: Exception) -> int:
    """Returns the bytes of a program that XLA for TPUs refused, with its arguments, as they exceed the memory."""
    reason = " ".join(str(error).split())
    found = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])", reason)
    if "RESOURCE_EXHAUSTED" not in reason or not found:
        raise UserError(f"XLA cannot compile the step for these devices: {reason[:500]}") from error
    return int(float(found[1]) * 2 ** (10 * (1 + "KMGT".index(found[2]))))


def plan(config: ExperimentConfig, devices: Sequence[Any], name: str) -> Plan:
    """Returns the plan of a configuration for devices; nothing is run on them.

    Args:
        config: the configuration.
        devices: may be virtual, or descriptions of chips.
        name: what is compiled and for what, for messages.
    """
    step = Step(config, config.mesh.build(devices))
    message(f"compiling {name}")
    compiled = step.compile()
    return Plan(step.mesh, config.data.batch_size, step.counts(), *step.flops(), step.memory(), compiled)


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
            if parameters.is_stacked(path):
                stack = path.rpartition("blocks/")[0]
                blocks[stack] = blocks.get(stack, 0) + size // leaf.shape[0]
            elif tree is trainable:
                outside += size
        largest_block = max(largest_block, *blocks.values(), 0)
    return outside + largest_block
