"""The ONNX counterpart of each JAX primitive that towers and heads use."""

import string
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from lit_het.errors import UserError
from lit_het.weights.onnx.graph import Graph, Value

Operator: TypeAlias = Callable[..., Value]
"""``(graph, equation, *inputs)`` to the output of an equation of a traced program."""


def unsupported(equation: Any, reason: str = "") -> UserError:
    """Returns the error for an equation without a counterpart."""
    return UserError(
        f"this model has no ONNX form: there is no counterpart of JAX's {equation.primitive.name}{reason}; export it "
        "with --to lit-het"
    )


def _node(operator: str) -> Operator:
    """Returns an operator of ONNX with the inputs of the primitive."""
    return lambda graph, equation, *inputs: graph.add(operator, *inputs)


def _reduce(operator: str) -> Operator:
    def reduce(graph: Graph, equation: Any, x: Value) -> Value:
        return graph.add(operator, x, np.array(equation.params["axes"], np.int64), keepdims=0)

    return reduce


def _constant(equation: Any, value: int) -> Value:
    return np.array(value, equation.outvars[0].aval.dtype)


def _erfc(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.add("Sub", _constant(equation, 1), graph.add("Erf", x))


def _log1p(graph: Graph, equation: Any, x: Value) -> Value:
    """Returns ``x log(u) / (u - 1)`` with u = 1 + x rounded, or x where u = 1: exact digits of small x (Kahan)."""
    one = _constant(equation, 1)
    u = graph.add("Add", x, one)
    quotient = graph.add("Div", graph.add("Log", u), graph.add("Sub", u, one))
    return graph.add("Where", graph.add("Equal", u, one), x, graph.add("Mul", x, quotient))


def _power(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.add("Pow", x, _constant(equation, equation.params["y"]))


def _select(graph: Graph, equation: Any, which: Value, *cases: Value) -> Value:
    if len(cases) != 2 or equation.invars[0].aval.dtype != bool:
        raise unsupported(equation, f" of {len(cases)} cases")
    return graph.add("Where", which, cases[1], cases[0])


def _cast(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.cast(x, equation.params["new_dtype"])


def _argmax(graph: Graph, equation: Any, x: Value) -> Value:
    (axis,) = equation.params["axes"]
    if equation.invars[0].aval.dtype == bool:
        x = graph.cast(x, np.int32)
    return graph.cast(graph.add("ArgMax", x, axis=axis, keepdims=0), equation.params["index_dtype"])


def _reshape(graph: Graph, equation: Any, x: Value) -> Value:
    sizes = equation.params["new_sizes"]
    if sum(not isinstance(size, int) for size in sizes) > 1:
        raise unsupported(equation, f" to {sizes}")
    return graph.add("Reshape", x, np.array([size if isinstance(size, int) else -1 for size in sizes], np.int64))


def _broadcast(graph: Graph, equation: Any, x: Value) -> Value:
    shape, axes = equation.params["shape"], [int(axis) for axis in equation.params["broadcast_dimensions"]]
    before: list[Any] = [1] * len(shape)
    for axis, size in zip(axes, equation.invars[0].aval.shape, strict=True):
        before[axis] = size
    if new := [axis for axis in range(len(shape)) if axis not in axes]:
        x = graph.add("Unsqueeze", x, np.array(new, np.int64))
    # Expand keeps the size of an axis whose target is 1.
    target = [1 if size == old else size for size, old in zip(shape, before, strict=True)]
    return graph.add("Expand", x, graph.shape(target)) if target != [1] * len(shape) else x


def _transpose(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.add("Transpose", x, perm=[int(axis) for axis in equation.params["permutation"]])


def _squeeze(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.add("Squeeze", x, np.array(equation.params["dimensions"], np.int64))


def _concatenate(graph: Graph, equation: Any, *parts: Value) -> Value:
    return graph.add("Concat", *parts, axis=equation.params["dimension"])


def _slice(graph: Graph, equation: Any, x: Value) -> Value:
    starts, stops = equation.params["start_indices"], equation.params["limit_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)
    whole = equation.invars[0].aval.shape
    cut = [
        (start, stop, axis, step)
        for axis, (start, stop, step, size) in enumerate(zip(starts, stops, steps, whole, strict=True))
        if (start, step) != (0, 1) or stop != size
    ]
    return graph.add("Slice", x, *np.array(cut, np.int64).T)


def _gather(graph: Graph, equation: Any, x: Value, indices: Value) -> Value:
    """Returns a part ``x[2:5, 7]`` at known indices, or rows ``x[indices]``, of each example where x has a batch."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if isinstance(indices, np.ndarray) and indices.ndim == 1:
        axes = numbers.start_index_map
        stops = [start + sizes[axis] for start, axis in zip(indices, axes, strict=True)]
        part = graph.add("Slice", x, *(np.array(value, np.int64) for value in (indices, stops, axes)))
        collapsed = np.array(numbers.collapsed_slice_dims, np.int64)
        return graph.add("Squeeze", part, collapsed) if len(collapsed) else part
    shape, rank = equation.invars[0].aval.shape, len(equation.outvars[0].aval.shape)
    batch = len(numbers.operand_batching_dims)
    leading = batch + len(numbers.start_index_map)
    is_rows = (
        numbers.operand_batching_dims == numbers.start_indices_batching_dims == tuple(range(batch))
        and numbers.collapsed_slice_dims == numbers.start_index_map == tuple(range(batch, leading))
        and numbers.offset_dims == tuple(range(rank - len(shape) + leading, rank))
        and sizes == (1,) * leading + shape[leading:]
    )
    if not is_rows:
        raise unsupported(equation, " of parts of rows")
    return graph.add("GatherND", x, graph.cast(indices, np.int64), batch_dims=batch)


def _dot(graph: Graph, equation: Any, a: Value, b: Value) -> Value:
    (contracted_a, contracted_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    rank_a, rank_b = (len(operand.aval.shape) for operand in equation.invars)
    if not batch_a and rank_b == 2 and (*contracted_a, *contracted_b) == (rank_a - 1, 0):
        return graph.add("MatMul", a, b)
    letters = iter(string.ascii_lowercase)
    of_a = [next(letters) for _ in range(rank_a)]
    shared = dict(zip((*batch_b, *contracted_b), (*batch_a, *contracted_a), strict=True))
    of_b = [of_a[shared[axis]] if axis in shared else next(letters) for axis in range(rank_b)]
    batch = [of_a[axis] for axis in batch_a]
    free = [of_a[axis] for axis in range(rank_a) if axis not in (*batch_a, *contracted_a)]
    free += [of_b[axis] for axis in range(rank_b) if axis not in shared]
    return graph.add("Einsum", a, b, equation=f"{''.join(of_a)},{''.join(of_b)}->{''.join(batch + free)}")


OPERATORS: Mapping[str, Operator] = {
    "abs": _node("Abs"),
    "add": _node("Add"),
    "and": _node("And"),
    "argmax": _argmax,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "convert_element_type": _cast,
    "copy": lambda graph, _, x: x,
    "cos": _node("Cos"),
    "div": _node("Div"),
    "dot_general": _dot,
    "eq": _node("Equal"),
    "erf": _node("Erf"),
    "erfc": _erfc,
    "exp": _node("Exp"),
    "gather": _gather,
    "ge": _node("GreaterOrEqual"),
    "gt": _node("Greater"),
    "integer_pow": _power,
    "le": _node("LessOrEqual"),
    "log": _node("Log"),
    "log1p": _log1p,
    "logistic": _node("Sigmoid"),
    "lt": _node("Less"),
    "max": _node("Max"),
    "min": _node("Min"),
    "mul": _node("Mul"),
    "ne": lambda graph, _, a, b: graph.add("Not", graph.add("Equal", a, b)),
    "neg": _node("Neg"),
    "not": _node("Not"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_sum": _reduce("ReduceSum"),
    "reshape": _reshape,
    "rsqrt": lambda graph, _, x: graph.add("Reciprocal", graph.add("Sqrt", x)),
    "select_n": _select,
    "sin": _node("Sin"),
    "slice": _slice,
    "sqrt": _node("Sqrt"),
    "square": lambda graph, _, x: graph.add("Mul", x, x),
    "squeeze": _squeeze,
    "stop_gradient": lambda graph, _, x: x,
    "sub": _node("Sub"),
    "tanh": _node("Tanh"),
    "transpose": _transpose,
}
"""By the names of primitives."""
