"""How arrays are split over devices; the only module that names the mesh axes ``data``, ``fsdp`` and ``expert``."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from lit_het import arguments
from lit_het.errors import UserError, require_at_least

AXES = ("data", "fsdp", "expert")
# Number of devices that share the fastest network: the GPUs of a machine, or neighbours in a TPU slice.
NEAR = 8
# Devices with different experts have different examples too: only the inputs and outputs of experts travel there.
BATCH_AXES = ("data", "fsdp", "expert")

# (pattern of the whole path, axis of each trailing dimension); the first match decides. Stacked blocks have a leading
# depth dimension, which is never sharded: a scan over it would gather one block after the other from a few devices.
# Optimizer moments have the paths of their parameters, so they match the same rules.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r".*/(v_row|v_col)/.*", ()),  # Adafactor's factored moments: small, and their shapes differ from the parameter's
    (r".*/experts/(up|gate)/kernel", ("expert", None, "fsdp")),
    (r".*/experts/down/kernel", ("expert", "fsdp", None)),
    (r".*/experts/.*/bias", ("expert", None)),
    (r".*/(query|key|value|up|gate|patches|projection|pre_logits)/kernel", (None, "fsdp")),
    (r".*/(factors|scale_of_factors|diagonal|unshared)/kernel", (None, "fsdp")),
    (r".*/(out|down)/kernel", ("fsdp", None)),
    (r".*/tokens/embedding", ("fsdp", None)),
    (r".*head/logits/kernel", (None, "fsdp")),
    (r".*", ()),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 chooses a size by the number of devices.

    Attributes:
        data: splits batches and replicates parameters; -1 takes all remaining devices.
        fsdp: splits batches and parameters; -1 takes 8 devices of a slice, or 4 or 2 if 8 do not divide a slice.
        expert: splits batches and the experts of a mixture, and replicates other parameters; -1 as for ``fsdp``.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            if getattr(self, name) != -1:
                require_at_least(1, self, name)
        if self.fsdp == self.expert == -1:
            raise UserError("--mesh.fsdp -1 and --mesh.expert -1 both take the nearest devices; set one of them")

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Returns the mesh over all devices; the nearest devices share ``expert``, then ``fsdp``."""
        devices = jax.devices() if devices is None else devices
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        # The absolute value counts a size of -1 as 1: at most one of both is -1.
        # The largest power of two that divides the devices of a slice, up to `NEAR`.
        near = math.gcd(len(devices) // slices // abs(self.fsdp * self.expert), NEAR)
        fsdp, expert = (near if size == -1 else size for size in (self.fsdp, self.expert))
        data = len(devices) // (fsdp * expert) if self.data == -1 else self.data
        if data * fsdp * expert != len(devices):
            raise UserError(
                f"mesh data x fsdp x expert = {self.data} x {self.fsdp} x {self.expert} does not fit "
                f"{len(devices)} devices; change --mesh.data, --mesh.fsdp or --mesh.expert"
            )
        if data % slices:
            raise UserError(f"mesh data = {data} must be a multiple of the number of slices, {slices}")
        # The network between slices is slow: only the axis data crosses it, for one sum of gradients per step.
        # Splitting physical axes lets 8 devices share parameters on a torus of 4 x 4 x 4.
        within, across = (data // slices, fsdp, expert), (slices, 1, 1)
        if slices == 1:
            placed = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
        else:
            placed = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * 3)


def of_one_slice(mesh: Mesh) -> Mesh:
    """Returns the part of a mesh within one slice of TPUs, whose devices a program for several slices numbers."""
    slices = len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})
    return Mesh(mesh.devices[: mesh.shape["data"] // slices], mesh.axis_names, axis_types=mesh.axis_types)


def as_own(mesh: Mesh | MeshConfig | None) -> Mesh:
    """Returns a mesh with the axes of this project over the devices of any mesh, or of sizes; None for all devices.

    Axes with this project's names keep their sizes; if there are others, all devices split batches.
    """
    arguments.instance(mesh, "mesh", Mesh | MeshConfig | None, "a mesh of JAX, MeshConfig(...) or None")
    if not isinstance(mesh, Mesh):
        return (mesh or MeshConfig()).build()
    sizes = dict(mesh.shape)
    config = MeshConfig(**sizes) if sizes.keys() <= set(AXES) else MeshConfig()
    return config.build(mesh.devices.flatten().tolist())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of every array of a batch: rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Checks that the mesh splits a global batch evenly."""
    shards = num_batch_shards(mesh)
    if batch_size % shards:
        below = batch_size - batch_size % shards
        raise UserError(
            f"batch size {batch_size} is not divisible by the {shards} devices that share it; "
            f"use --data.batch-size {f'{below} or ' if below else ''}{below + shards}"
        )


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns a `NamedSharding` for every leaf of a tree of arrays or shapes, by `RULES`.

    A dimension that the axis ``fsdp`` does not divide is replicated.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_sharding(path, leaf.shape, mesh), tree)


def _leaf_sharding(path: Any, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = next(axes for pattern, axes in RULES if re.fullmatch(pattern, name))
    # optax stores placeholders under the path of a parameter, which may have fewer dimensions than the parameter.
    axes = (None,) * (len(shape) - len(axes)) + axes if len(shape) >= len(axes) else (None,) * len(shape)
    if "expert" in axes and shape[axes.index("expert")] % mesh.shape["expert"]:
        raise UserError(
            f"the {shape[axes.index('expert')]} experts of {name.split('/experts/')[0]} cannot be split over "
            f"--mesh.expert {mesh.shape['expert']}; use a divisor of it"
        )
    # Replicated instead of refused: a head of 1,379 classes must work on 8 devices.
    fits = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*fits))


def shard_bytes(leaf: Any) -> int:
    """Returns the bytes of an array, or of a shape with a sharding, on each device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def used_bytes(leaf: Any) -> int:
    """Returns the bytes of a parameter in use on a device: gathered over ``fsdp``, but only its own experts."""
    spec = [axis if axis == "expert" else None for axis in leaf.sharding.spec]
    used = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
    return math.prod(used.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of devices that share a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def num_automatic_shards() -> int:
    """Returns the number of devices over which the compiler splits a batch here.

    It is 1 outside `jax.set_mesh`, and inside `jax.shard_map`, where code sees the rows of one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if types.get(axis) == AxisType.Auto)


def as_batch(x: Shaped[Array, "rows *rest"]) -> Shaped[Array, "rows *rest"]:
    """Constrains rows to be split over devices like the batch."""
    # Without the constraint the compiler may split activations like the sharded kernel they meet, and then moves the
    # activations of the whole batch instead of the kernel.
    shards = num_automatic_shards()
    if shards == 1 or x.shape[0] % shards:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def map_shards(function: Callable[[Any, Any, tuple[str, ...]], Any], rows: Any, shared: Any) -> Any:
    """Runs a function on every device's shard of the rows, and returns the stacked results, ``[shards ...]``.

    Args:
        function: ``(rows, shared, axes)`` to a tree of arrays; ``axes`` are the mesh axes for collectives, empty where
            one device has all rows.
        rows: a tree of arrays, split along the leading axis over the devices of `jax.set_mesh` if they divide it.
        shared: a tree of arrays that every device receives whole.
    """
    shards = num_automatic_shards()
    if shards == 1 or jax.tree.leaves(rows)[0].shape[0] % shards:
        return _stacked(function(rows, shared, ()))
    # A shard_map instead of constraints: the function decides itself where devices communicate, and XLA adds no
    # collective.
    split, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
    # check_vma (JAX 0.10) rejects scans that start from constants and carry values of a device, as those of
    # `lit_het.losses.blocks` do, which also run outside shard_map.
    return jax.shard_map(
        lambda rows, shared: _stacked(function(rows, shared, BATCH_AXES)),
        in_specs=(split, whole),
        out_specs=split,
        check_vma=False,
    )(rows, shared)


def map_groups(function: Callable[[Any], Array], rows: Any, num_groups: int) -> Shaped[Array, "rows *rest"]:
    """Runs a function on one group of rows after the other, and returns the rows of its results in order.

    The backward pass runs it again, so that only the rows are saved.

    Args:
        function: of a tree like ``rows``, but with the rows of a group, to an array with rows.
        rows: a tree of arrays, whose leading axes the groups of all devices divide.
        num_groups: how many; each has adjacent rows of every device, so that no row moves.
    """
    shards = num_automatic_shards()

    def split(x: Array) -> Array:
        parts = x.reshape(shards, num_groups, -1, *x.shape[1:]).swapaxes(0, 1)
        return parts.reshape(num_groups, -1, *x.shape[1:])

    # With the constraint outside, the constrained rows of all groups would be saved beside the rows.
    @jax.checkpoint
    def of_group(group: Any) -> Array:
        return function(jax.tree.map(as_batch, group))

    results = jax.lax.map(of_group, jax.tree.map(split, rows))
    in_order = results.reshape(num_groups, shards, -1, *results.shape[2:]).swapaxes(0, 1)
    return as_batch(in_order.reshape(-1, *results.shape[2:]))


def map_array_shards(
    function: Callable[[jax.Array, Sequence[Any], tuple[int, ...]], jax.Array], where: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that maps every shard of an array on its own devices to ``[shards, ...]``.

    Args:
        function: ``(shard, its first index along each axis, shape of the whole array)`` to an array.
        where: an even sharding of the array.
    """
    mesh = where.mesh
    named = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in where.spec]

    def map_shard(shard: jax.Array) -> jax.Array:
        axes = list(zip(shard.shape, (*named, *[()] * (shard.ndim - len(named))), strict=True))
        starts = [jax.lax.axis_index(names) * size if names else 0 for size, names in axes]
        shape = tuple(size * math.prod(mesh.shape[name] for name in names) for size, names in axes)
        return function(shard, starts, shape)[None]

    # The result has one leading axis that all named mesh axes split: one entry per shard.
    parts = PartitionSpec(tuple(name for names in named for name in names))
    # A shard_map, so that no shard ever leaves its device: whole parameters might not fit into one.
    return jax.shard_map(map_shard, mesh=mesh, in_specs=where.spec, out_specs=parts, check_vma=False)


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[None], tree)


def to_experts(x: Float[Array, "e g c d"]) -> Float[Array, "e g c d"]:
    """Moves the inputs of experts from the devices of the examples to those of the experts, by an all-to-all."""
    return _exchange(x, PartitionSpec(None, BATCH_AXES), PartitionSpec("expert", ("data", "fsdp")))


def from_experts(x: Float[Array, "e g c d"]) -> Float[Array, "e g c d"]:
    """Moves the outputs of experts back; the inverse of `to_experts`."""
    return _exchange(x, PartitionSpec("expert", ("data", "fsdp")), PartitionSpec(None, BATCH_AXES))


def _exchange(x: Float[Array, "e g c d"], before: PartitionSpec, after: PartitionSpec) -> Float[Array, "e g c d"]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.shape[0] % mesh.shape["expert"] or x.shape[1] % num_automatic_shards():
        return x
    # Two constraints make one all-to-all; with only the second the compiler may gather the whole array on every device.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, before), after)


def place(tree: Any, shardings: Any) -> Any:
    """Returns arrays that every process holds whole, on the devices of all.

    Args:
        tree: of arrays.
        shardings: of each array, or one of all.
    """
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_placed, tree, shardings)


def _placed(array: Any, where: NamedSharding) -> jax.Array:
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    # `jax.device_put` refuses arrays on devices of one process, and sends those of NumPy to all others to compare.
    return place_on_devices(np.asarray(array), where)


def place_on_devices(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns an array on its devices: the default device where ``sharding`` is None."""
    # Waiting for the copy keeps at most one array in both memories.
    if sharding is None:
        return jax.block_until_ready(jax.device_put(array))
    return jax.block_until_ready(jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]))
