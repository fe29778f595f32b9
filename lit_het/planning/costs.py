"""Costs of a traced function before compilation: matrix products, and memory of intermediate values."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

# What JAX names the operations that `jax.checkpoint` computes again.
_AGAIN = "rematted_computation"
# Operations with an inner loop over their operands, which must be in memory.
_READS_WHOLE = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "sort", "scatter"})
# Operations whose result is written to memory.
_WRITES = _READS_WHOLE | {"gather", "scatter-add", "concatenate", "dynamic_update_slice", "cumsum", "while"}


def product_flops(function: Callable, *arguments: Any, scope: str = "") -> int:
    """Returns floating-point operations of matrix products and convolutions, multiplied by the iterations of loops.

    What the backward pass computes again to save memory is left out: the model does not need it.

    Args:
        function: the function to trace; it is not computed.
        arguments: arrays or shapes.
        scope: counts only what is within this `jax.named_scope`, and its gradients; empty for all.
    """
    return traced_flops(jax.make_jaxpr(function)(*arguments).jaxpr, scope)


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """Bytes of intermediate values on one device, without parameters and their gradient.

    Attributes:
        saved: values that the forward pass saves for the backward pass, as many as there are rows.
        kernels: what it saves for any number of rows: parameters in the type of computations, not split over devices.
        forward: further values at the peak of the forward pass, in the order of the traced operations.
        backward: further values at the peak of the backward pass.
    """

    saved: int
    kernels: int
    forward: int
    backward: int


def intermediate_bytes(loss: Callable[..., Any], params: Any, rest: Callable[[int], Any], rows: int) -> Intermediate:
    """Returns the memory of a loss and its gradient that grows with the batch.

    It is that of the traced operations; a compiler merges some of them, and copies values for others.

    Args:
        loss: ``(params, *rest)`` to a scalar.
        params: shapes of differentiated parameters.
        rest: a number of rows to the shapes of other inputs.
        rows: rows of the batch on a device.
    """
    # What is larger for twice the rows grows with the batch; constants, such as gradients of parameters, do not.
    few, many = (_traced(loss, params, rest(count)) for count in (rows, 2 * rows))
    saved = max(0, many.saved - few.saved)
    forward, backward = (
        _growing_peak(one, other) for one, other in ((few.forward, many.forward), (few.backward, many.backward))
    )
    return Intermediate(saved, max(0, few.saved - saved), forward, backward)


class _Traced(NamedTuple):
    """Bytes that the forward pass saves, the forward pass, and the backward pass alone."""

    saved: int
    forward: core.Jaxpr
    backward: core.Jaxpr


def _traced(loss: Callable[..., Any], params: Any, rest: Any) -> _Traced:
    forward = jax.make_jaxpr(loss)(params, *rest)

    def saving(params: Any, *rest: Any) -> Any:
        # The gradients of what is traced already: to trace the model again would take longer.
        return jax.vjp(lambda params: core.jaxpr_as_fun(forward)(*jax.tree.leaves((params, *rest)))[0], params)[1]

    residuals, gradient = jax.make_jaxpr(saving, return_shape=True)(params, *rest)
    inputs = {id(v) for v in (*residuals.jaxpr.invars, *residuals.jaxpr.constvars)}
    saved = sum(_bytes(v.aval) for v in _distinct(residuals.jaxpr.outvars) if id(v) not in inputs)
    backward = jax.make_jaxpr(lambda gradient, one: gradient(one))(gradient, forward.out_avals[0])
    return _Traced(saved, forward.jaxpr, backward.jaxpr)


def _growing_peak(few: core.Jaxpr, many: core.Jaxpr) -> int:
    """Returns the peak of what is larger in the second of two programs, which differ in the rows of their batch."""
    sizes: dict[int, int] = {}
    if _compare(few, many, sizes):
        return _peak(few, sizes)
    # More rows may need a loop over blocks, and then values have no partners: the peaks may be at different places.
    return max(0, _peak(many, {}) - _peak(few, {}))


def _compare(few: core.Jaxpr, many: core.Jaxpr, sizes: dict[int, int]) -> bool:
    """Adds by how many bytes each value of the second program is larger; False if they have other operations."""
    if [eqn.primitive for eqn in few.eqns] != [eqn.primitive for eqn in many.eqns]:
        return False
    for one, other in zip(few.eqns, many.eqns, strict=True):
        for v, w in zip(one.outvars, other.outvars, strict=True):
            sizes[id(v)] = max(0, _bytes(w.aval) - _bytes(v.aval))
        inner = list(_inner(one)), list(_inner(other))
        if len(inner[0]) != len(inner[1]) or not all(_compare(*pair, sizes) for pair in zip(*inner, strict=True)):
            return False
    return True


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays or shapes of a tree, not split over devices."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def traced_flops(jaxpr: core.Jaxpr, scope: str = "") -> int:
    """Returns `product_flops` of a program that is traced already."""
    total = 0
    for eqn in jaxpr.eqns:
        names = str(eqn.source_info.name_stack)
        if _AGAIN in names:
            continue
        # Names of inner programs start anew: within the scope, all of their operations count.
        left = "" if scope in names else scope
        total += 0 if left else _own_flops(eqn)
        inner = [traced_flops(jaxpr, left) for jaxpr in _inner(eqn)]
        if eqn.primitive.name == "cond":
            # Only one branch runs; the costs are upper bounds.
            inner = [max(inner)]
        # The body of a shard_map is the work of one device.
        times = eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else eqn.params.get("length", 1)
        total += times * sum(inner)
    return total


def _own_flops(eqn: core.JaxprEqn) -> int:
    """Returns the operations of a product or a convolution; 0 for other operations."""
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    operands: list[Any] = [v.aval for v in eqn.invars]
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            return 2 * out.size * math.prod(operands[0].shape[axis] for axis in contracted)
        case "ragged_dot" | "ragged_dot_general":
            # Each row is multiplied by the kernel of one expert only.
            return 2 * out.size * operands[0].shape[-1]
        case "conv_general_dilated":
            kernel = operands[1]
            outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            return 2 * out.size * kernel.size // outputs
        case _:
            return 0


def _peak(jaxpr: core.Jaxpr, sizes: Mapping[int, int]) -> int:
    """Returns the peak of live bytes, without inputs of the program; ``sizes`` of values count instead of their own."""
    merged = _merged(jaxpr)
    last_use = {id(v): len(jaxpr.eqns) for v in jaxpr.outvars}
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        # The operation that reads a merged value computes it from the operands of the merged operation.
        end = max((last_use.get(id(v), number) for v in eqn.outvars if id(v) in merged), default=number)
        # A value dies after the last operation that reads it; XLA reuses its memory from there on.
        for v in eqn.invars:
            last_use[id(v)] = max(last_use.get(id(v), 0), end)
    alive: dict[int, int] = {}
    peak = 0
    for number, eqn in enumerate(jaxpr.eqns):
        made = {id(v): sizes.get(id(v), _bytes(v.aval)) for v in eqn.outvars if id(v) not in merged}
        inner = max((_peak(one, sizes) for one in _inner(eqn)), default=0)
        # The values of one iteration of a scan exist beside its stacked results; other calls create results inside.
        need = sum(made.values()) + inner if eqn.primitive.name == "scan" else max(sum(made.values()), inner)
        dead = {name: size for name, size in alive.items() if last_use.get(name, -1) <= number}
        if dead and _is_elementwise(eqn):
            # The result takes the place of an operand that nothing reads any more.
            need -= min(need, max(dead.values()))
        if eqn.primitive.name == "scan":
            # So does what a loop carries.
            start = eqn.params["num_consts"]
            carried = {id(v) for v in eqn.invars[start : start + eqn.params["num_carry"]]}
            need -= min(need, sum(dead[name] for name in carried & dead.keys()))
        peak = max(peak, sum(alive.values()) + need)
        alive = {name: size for name, size in (alive | made).items() if last_use.get(name, -1) > number}
    return peak


def _merged(jaxpr: core.Jaxpr) -> set[int]:
    """Returns values that are never written: elementwise operations, merged into the operation that reads them."""
    read_whole = {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _READS_WHOLE or (any(_inner(eqn)) and not _is_elementwise(eqn)):
            read_whole |= {id(v) for v in eqn.invars}
    return {id(v) for eqn in filter(_is_elementwise, jaxpr.eqns) for v in eqn.outvars} - read_whole


def _is_elementwise(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "custom_jvp_call":
        # XLA sees only the operations of a function that has a derivative of its own.
        return all(_is_elementwise(one) for inner in _inner(eqn) for one in inner.eqns)
    return not (eqn.primitive.name in _WRITES or any(_inner(eqn)))


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _distinct(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
