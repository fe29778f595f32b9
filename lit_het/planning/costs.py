"""Costs of a function by its traced form, before any compiler: products, and memory of its intermediate values."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Operations with an inner loop over what they read.
_READS_WHOLE = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "sort", "scatter"})
# Operations whose result is written whole.
_WRITES = _READS_WHOLE | {"gather", "scatter-add", "concatenate", "dynamic_update_slice", "cumsum", "while"}


def product_flops(function: Callable, *arguments: Any) -> int:
    """Returns the floating-point operations of matrix products and convolutions, those of loops as often as they run.

    Args:
        function: what to trace; nothing is computed.
        arguments: arrays or shapes.
    """
    return _product_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """Bytes of intermediate values on one device, without parameters and their gradient.

    Attributes:
        kept: what going forward leaves for going backward.
        working: what the moment of greatest need takes beside that, whatever the order that a compiler chooses.
    """

    kept: int
    working: int


def intermediate_bytes(loss: Callable[..., Any], params: Any, rest: Callable[[int], Any], rows: int) -> Intermediate:
    """Returns the memory of a loss and its gradient that grows with the batch.

    Operations are taken one by one, as they are traced; a compiler merges some and copies others.

    Args:
        loss: ``(params, *rest)`` to a scalar.
        params: shapes of what is differentiated.
        rest: a number of rows to the shapes of other inputs.
        rows: of the batch on a device.
    """
    # What does not grow is of parameters: kernels in another type, and gradients.
    few, many = (_of_rows(loss, params, rest(count)) for count in (rows, 2 * rows))
    kept, forward, backward = (max(0, more - less) for more, less in zip(many, few, strict=True))
    return Intermediate(kept, max(forward, backward - kept))


def _of_rows(loss: Callable[..., Any], params: Any, rest: Any) -> tuple[int, int, int]:
    """Returns bytes that going forward leaves, and at most needs without leaving them; and those of both ways."""
    left = jax.make_jaxpr(lambda params, *rest: jax.vjp(lambda p: loss(p, *rest), params)[1])(params, *rest).jaxpr
    inputs = set(map(id, left.invars)) | set(map(id, left.constvars))
    kept = sum(_bytes(v.aval) for v in _distinct(left.outvars) if id(v) not in inputs)
    forward, both = (jax.make_jaxpr(function)(params, *rest).jaxpr for function in (loss, jax.grad(loss)))
    return kept, _peak(forward), _peak(both)


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays or shapes of a tree, as if each device held them whole."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _product_flops(jaxpr: core.Jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        out: Any = eqn.outvars[0].aval if eqn.outvars else None
        operands: list[Any] = [v.aval for v in eqn.invars]
        match eqn.primitive.name:
            case "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                total += 2 * out.size * math.prod(operands[0].shape[axis] for axis in contracted)
            case "ragged_dot" | "ragged_dot_general":
                total += 2 * out.size * operands[0].shape[-1]
            case "conv_general_dilated":
                kernel = operands[1]
                outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
                total += 2 * out.size * kernel.size // outputs
            case _:
                inner = [_product_flops(jaxpr) for jaxpr in _inner(eqn)]
                if eqn.primitive.name == "cond":
                    inner = [max(inner)]
                # What stands in a map over devices is the work of one.
                times = eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else eqn.params.get("length", 1)
                total += times * sum(inner)
    return total


def _peak(jaxpr: core.Jaxpr) -> int:
    """Returns the most bytes that are alive at a time, inputs of the program apart."""
    merged = _merged(jaxpr)
    last_use = {id(v): len(jaxpr.eqns) for v in jaxpr.outvars}
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        # Whoever reads a value that is never written computes it from what it is made of.
        end = max((last_use.get(id(v), number) for v in eqn.outvars if id(v) in merged), default=number)
        for v in eqn.invars:
            last_use[id(v)] = max(last_use.get(id(v), 0), end)
    alive: dict[int, int] = {}
    peak = 0
    for number, eqn in enumerate(jaxpr.eqns):
        made = {id(v): _bytes(v.aval) for v in eqn.outvars if id(v) not in merged}
        inner = max(map(_peak, _inner(eqn)), default=0)
        # What a loop makes in one turn lies beside what it has stacked; what another call returns is made inside it.
        need = sum(made.values()) + inner if eqn.primitive.name == "scan" else max(sum(made.values()), inner)
        peak = max(peak, sum(alive.values()) + need)
        alive = {name: size for name, size in (alive | made).items() if last_use.get(name, -1) > number}
    return peak


def _merged(jaxpr: core.Jaxpr) -> set[int]:
    """Returns the values that are never written: element by element, they go into the operation that reads them."""
    read_whole = {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _READS_WHOLE or any(_inner(eqn)):
            read_whole |= {id(v) for v in eqn.invars}
    elementwise = (eqn for eqn in jaxpr.eqns if not (eqn.primitive.name in _WRITES or any(_inner(eqn))))
    return {id(v) for eqn in elementwise for v in eqn.outvars} - read_whole


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
