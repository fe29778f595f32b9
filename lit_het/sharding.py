"""Where arrays live: the only module that knows the mesh axes ``data``, ``fsdp`` and ``expert``."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from lit_het.errors import UserError, require_at_least

AXES = ("data", "fsdp", "expert")
# So many share the fastest network: the GPUs of a machine, or neighbours of a TPU slice.
NEAR = 8
# Devices that hold different experts have different examples too: nothing but experts' inputs travels between them.
BATCH_AXES = ("data", "fsdp", "expert")

# (pattern of the whole path, axis of each trailing dimension); the first match decides. Stacked blocks have a
# leading depth dimension, which is never sharded. Optimizer moments match like the parameters they follow.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r".*/(v_row|v_col)/.*", ()),  # Adafactor's factored moments: small, and of other dimensions than their parameter
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
    """Sizes of the mesh axes, of which -1 leaves one to the devices that there are.

    Attributes:
        data: batches are split, parameters repeated; -1 takes the devices that the others leave.
        fsdp: batches and parameters are split; -1 takes 8 devices of a slice, or, where 8 do not divide theirs, 4 or 2.
        expert: batches and the experts of a mixture are split, other parameters repeated; -1 as for ``fsdp``.

    Raises:
        UserError: another size below 1, or more than one of ``fsdp`` and ``expert`` left open.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            if getattr(self, name) != -1:
                require_at_least(1, self, name)
        if self.fsdp == self.expert == -1:
            raise UserError("--mesh.fsdp -1 and --mesh.expert -1 both take the nearest devices; give one of them")

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Returns the mesh over all devices, as their network lies: the closest share ``expert``, then ``fsdp``.

        Raises:
            UserError: the sizes do not multiply to the number of devices, or ``data`` to that of slices.
        """
        devices = jax.devices() if devices is None else devices
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        # What is given of both: -1 counts as 1.
        near = math.gcd(len(devices) // slices // abs(self.fsdp * self.expert), NEAR)
        fsdp, expert = (near if size == -1 else size for size in (self.fsdp, self.expert))
        data = len(devices) // (fsdp * expert) if self.data == -1 else self.data
        if data * fsdp * expert != len(devices):
            raise UserError(
                f"mesh data x fsdp x expert = {self.data} x {self.fsdp} x {self.expert} does not fit "
                f"{len(devices)} devices; change --mesh.data, --mesh.fsdp or --mesh.expert"
            )
        if data % slices:
            raise UserError(f"mesh data = {data} must be a multiple of the {slices} slices, between which it lies")
        shape, types = (data, fsdp, expert), (AxisType.Auto,) * 3
        if slices == 1:
            return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
        # Between slices the network is slow: gradients alone travel there, once a step.
        within = (data // slices, fsdp, expert)
        return Mesh(mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices), AXES, axis_types=types)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of every array of a batch: rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def whole(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Refuses a global batch that the mesh cannot split evenly.

    Raises:
        UserError: ``batch_size`` is not a multiple of the devices that share it.
    """
    shares = num_batch_shares(mesh)
    if batch_size % shares:
        below = batch_size - batch_size % shares
        raise UserError(
            f"batch size {batch_size} is not divisible by the {shares} devices that share it; "
            f"use --data.batch-size {below or shares} or {below + shares}"
        )


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns a `NamedSharding` for every leaf of a tree of arrays or shapes, by `RULES`.

    A dimension that the axis ``fsdp`` does not divide evenly is repeated.

    Raises:
        UserError: the axis ``expert`` does not divide the experts.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_sharding(path, leaf.shape, mesh), tree)


def _leaf_sharding(path: Any, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = next(axes for pattern, axes in RULES if re.fullmatch(pattern, name))
    # Placeholders that optimizers keep under a parameter's path may have fewer dimensions than it.
    axes = (None,) * (len(shape) - len(axes)) + axes if len(shape) >= len(axes) else (None,) * len(shape)
    if "expert" in axes and shape[axes.index("expert")] % mesh.shape["expert"]:
        raise UserError(
            f"the {shape[axes.index('expert')]} experts of {name.split('/experts/')[0]} cannot be split over "
            f"--mesh.expert {mesh.shape['expert']}; take a divisor"
        )
    fits = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*fits))


def part_bytes(leaf: Any) -> int:
    """Returns the bytes of an array's part on each device; it may be a shape with a sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def used_bytes(leaf: Any) -> int:
    """Returns the bytes of a parameter that a device computes with: all of it, or its own experts."""
    spec = [axis if axis == "expert" else None for axis in leaf.sharding.spec]
    used = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
    return math.prod(used.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def num_batch_shares(mesh: Mesh) -> int:
    """Returns over how many devices a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def num_automatic_shares() -> int:
    """Returns over how many devices the compiler splits a batch here: 1 outside `jax.set_mesh`, and per device."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if types.get(axis) == AxisType.Auto)


def as_batch(x: Shaped[Array, "rows *rest"]) -> Shaped[Array, "rows *rest"]:
    """Keeps rows where the examples are: the compiler would else move activations to the parts of sharded kernels."""
    shares = num_automatic_shares()
    if shares == 1 or x.shape[0] % shares:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def map_shares(function: Callable[[Any, Any, tuple[str, ...]], Any], rows: Any, shared: Any) -> Any:
    """Runs a function on every device's share of the rows, and returns the results side by side, ``[shares ...]``.

    Args:
        function: ``(rows, shared, axes)`` to a tree of arrays; ``axes`` name the devices for collectives and are empty
            where one device holds all rows.
        rows: a tree of arrays whose leading axis is split over the devices of `jax.set_mesh`, if they divide it.
        shared: a tree of arrays that every device sees whole.
    """
    shares = num_automatic_shares()
    if shares == 1 or jax.tree.leaves(rows)[0].shape[0] % shares:
        return _stacked(function(rows, shared, ()))
    split, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
    return jax.shard_map(
        lambda rows, shared: _stacked(function(rows, shared, BATCH_AXES)),
        in_specs=(split, whole),
        out_specs=split,
        check_vma=False,
    )(rows, shared)


def for_each_part(
    function: Callable[[jax.Array, Sequence[Any], tuple[int, ...]], jax.Array], where: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Returns what applies a function to the parts of an array, each on the devices that hold it: ``[parts, ...]``.

    Args:
        function: ``(part, where it begins along each axis, shape of the whole)`` to an array.
        where: how the arrays are split, evenly.
    """
    mesh = where.mesh
    named = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in where.spec]

    def of_part(part: jax.Array) -> jax.Array:
        axes = list(zip(part.shape, (*named, *[()] * (part.ndim - len(named))), strict=True))
        starts = [jax.lax.axis_index(names) * size if names else 0 for size, names in axes]
        shape = tuple(size * math.prod(mesh.shape[name] for name in names) for size, names in axes)
        return function(part, starts, shape)[None]

    parts = PartitionSpec(tuple(name for names in named for name in names))
    return jax.shard_map(of_part, mesh=mesh, in_specs=where.spec, out_specs=parts, check_vma=False)


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[None], tree)


def to_experts(x: Float[Array, "e g c d"]) -> Float[Array, "e g c d"]:
    """Moves what groups of examples send to experts from the groups' devices to the experts': an all-to-all."""
    return _exchange(x, PartitionSpec(None, BATCH_AXES), PartitionSpec("expert", ("data", "fsdp")))


def from_experts(x: Float[Array, "e g c d"]) -> Float[Array, "e g c d"]:
    """Moves what experts return back; inverts `to_experts`."""
    return _exchange(x, PartitionSpec("expert", ("data", "fsdp")), PartitionSpec(None, BATCH_AXES))


def _exchange(x: Float[Array, "e g c d"], before: PartitionSpec, after: PartitionSpec) -> Float[Array, "e g c d"]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.shape[0] % mesh.shape["expert"] or x.shape[1] % num_automatic_shares():
        return x
    # Both are named, or the compiler might gather everything everywhere.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, before), after)
