"""Towers that are trained in part: low-rank changes of dense layers, and stacks of blocks that are divided."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError
from lit_het.towers.encoder_config import LOWER
from lit_het.towers.tuning_config import LoRA, plain_path

# The products of experts are not those of a dense layer.
_EXPERTS = "mixture"


class LoRALinear(nnx.Linear):
    """A dense layer with a low-rank change of its kernel; parameters of stacked layers have leading axes.

    The change is 0 at first: A is drawn as LoRA's authors do in their code, and B is 0.
    """

    def __init__(self, layer: nnx.Linear, config: LoRA, rngs: nnx.Rngs):
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        *stack, size_in, size_out = layer.kernel.shape

        def low_rank(rows: int, columns: int, init: Any) -> nnx.Linear:
            def stacked(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
                return init(key, (*stack, *shape), dtype)

            return nnx.Linear(rows, columns, use_bias=False, dtype=layer.dtype, kernel_init=stacked, rngs=rngs)

        # Uniform of variance 1 / (3 i).
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=tuple(range(len(stack))))
        self.scale, self.dora = config.scale, config.dora
        down = low_rank(size_in, config.rank, uniform)
        up = low_rank(config.rank, size_out, nnx.initializers.zeros)
        self.lora: Any = nnx.Dict(down=down, up=up)
        if config.dora:
            self.lora.magnitude = nnx.Param(jnp.linalg.norm(layer.kernel[...], axis=-2))

    def __call__(self, inputs: Float[Array, "n i"], out_sharding: Any = None) -> Float[Array, "n o"]:
        """Returns ``x (W + scale A B) + b``, with columns of the norms m of DoRA."""
        products = super().__call__(inputs, out_sharding)
        change = self.lora.up(self.lora.down(inputs)) * self.scale
        if not self.dora:
            return products + change
        kernel = _changed(self.kernel[...], self.lora.down.kernel[...], self.lora.up.kernel[...], self.scale)
        # Without a gradient through the norm (DoRA, Sec. 4.3): no product of the size of the kernel's gradient.
        factor = _factor(self.lora.magnitude[...], jax.lax.stop_gradient(kernel)).astype(products.dtype)[None]
        bias = 0.0 if self.bias is None else self.bias[...].astype(products.dtype)[None]
        return (products - bias + change) * factor + bias


def add_lora(tower: nnx.Module, config: LoRA, rngs: nnx.Rngs) -> None:
    """Replaces the dense layers whose paths match by layers with low-rank changes.

    Raises:
        UserError: no path matches, or the rank is more than a kernel can have.
    """
    layers = {
        path: module
        for path, module in nnx.iter_modules(tower)
        if isinstance(module, nnx.Linear) and _EXPERTS not in path
    }
    matching = {path: layer for path, layer in layers.items() if re.fullmatch(config.pattern, "/".join(map(str, path)))}
    if not matching:
        known = ", ".join(sorted("/".join(map(str, path)) for path in layers))
        raise UserError(f"tuning.lora.pattern = {config.pattern!r} matches no dense layer of the tower: it has {known}")
    for (*parents, name), layer in sorted(matching.items()):
        if config.rank > (most := min(layer.kernel.shape[-2:])):
            where = "/".join(map(str, (*parents, name)))
            raise UserError(
                f"tuning.lora.rank = {config.rank} is more than the {most} of the kernel of {where}; lower it"
            )
        holder: Any = tower
        for parent in parents:
            holder = getattr(holder, str(parent))
        setattr(holder, str(name), LoRALinear(layer, config, rngs))


def divide_blocks(tower: Any, last_blocks: int) -> None:
    """Divides the stacks of a tower's blocks, so that the last blocks are apart from those that are locked.

    Locked parameters then have no gradient, no optimizer state, and no place in checkpoints.
    """
    encoder = tower.encoder
    if last_blocks > encoder.config.depth:
        raise UserError(
            f"tuning.last_blocks = {last_blocks} is more than the {encoder.config.depth} blocks of the tower; leave "
            "tuning out to train all"
        )
    encoder.num_lower = encoder.config.depth - last_blocks
    for name, numbers in encoder.config.stacks.items():
        count = sum(number < encoder.num_lower for number in numbers)
        blocks = getattr(encoder, name)
        if count:
            setattr(encoder, f"{LOWER}{name}", _rows(blocks, slice(0, count)))
        if 0 < count < len(numbers):
            setattr(encoder, name, _rows(blocks, slice(count, None)))
        elif count:
            delattr(encoder, name)


def with_changes(params: Mapping[str, Any], config: LoRA) -> dict[str, Any]:
    """Returns the parameters of a tower, by path, with low-rank changes added to the kernels."""
    found = {path: array for path, array in params.items() if "/lora/" not in path}
    for path in params:
        if path.endswith("/lora/down/kernel"):
            layer = path.removesuffix("/lora/down/kernel")
            kernel = _changed(found[f"{layer}/kernel"], params[path], params[f"{layer}/lora/up/kernel"], config.scale)
            if (magnitude := params.get(f"{layer}/lora/magnitude")) is not None:
                kernel = kernel * _factor(magnitude, kernel)[..., None, :]
            found[f"{layer}/kernel"] = kernel
    return found


def joined(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters by path with the stacks of `divide_blocks` joined."""
    found: dict[str, Any] = {}
    for path, array in sorted(params.items(), key=lambda item: LOWER not in item[0]):
        plain = plain_path(path)
        found[plain] = jnp.concatenate([found[plain], array]) if plain in found else array
    return found


def divided(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those parameters of a tuned tower, by path, that the parameters of the plain tower determine.

    Args:
        params: of the plain tower.
        shapes: of the tuned tower.
    """
    found = {
        path: _part(params[plain_path(path)], path, shape.shape)
        for path, shape in shapes.items()
        if plain_path(path) in params
    }
    for path in shapes:
        if (
            path.endswith("/lora/magnitude")
            and (kernel := found.get(f"{path.removesuffix('lora/magnitude')}kernel")) is not None
        ):
            found[path] = jnp.linalg.norm(kernel, axis=-2)
    return found


def _part(array: Array, path: str, shape: tuple[int, ...]) -> Array:
    """Returns the blocks of a stack that are those of a path."""
    if array.shape == shape:
        return array
    return array[: shape[0]] if plain_path(path) != path else array[-shape[0] :]


def _rows(blocks: nnx.Module, rows: slice) -> nnx.Module:
    graph, state = nnx.split(blocks)
    return nnx.merge(graph, jax.tree.map(lambda array: array[rows], state))


def _changed(kernel: Array, down: Array, up: Array, scale: float) -> Array:
    return kernel.astype(jnp.float32) + scale * (down @ up)


def _factor(magnitude: Array, kernel: Array) -> Array:
    """Returns ``m / |v|`` of each column v of a kernel; 1 of a column of zeros, which A B can then change."""
    norm = jnp.linalg.norm(kernel, axis=-2)
    # The gradient of m / |v| would be NaN there, too.
    return jnp.where(norm > 0, magnitude / jnp.where(norm > 0, norm, 1), 1)
