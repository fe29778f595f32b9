"""Pure JAX functions to ONNX: a function is traced once, and each equation of its program becomes nodes.

What does not depend on the inputs is computed while converting, scans (over the blocks of an encoder) are unrolled, and
calls are inlined.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lit_het.weights.onnx.graph import Graph, Value
from lit_het.weights.onnx.operators import OPERATORS, unsupported

# Primitives that call a function, and the parameter that holds it.
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def convert(
    function: Callable[..., Mapping[str, jax.Array]], inputs: Mapping[str, tuple[tuple[int, ...], Any]]
) -> onnx.ModelProto:
    """Returns the ONNX model of a function, for any number of examples.

    Args:
        function: arrays with a common leading dimension, the batch, to named arrays; its parameters are constants.
        inputs: name, and shape without the batch and type, of each argument in order.
    """
    (batch,) = jax.export.symbolic_shape("batch")
    arguments = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in inputs.values()]
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    graph = Graph(batch, next(iter(inputs)))
    results = _run(graph, program, list(inputs))
    # A dictionary is flattened in the order of its keys.
    for name, value in zip(sorted(shapes), results, strict=True):
        graph.add("Identity", value, name=name)
    return graph.finish(dict(zip(inputs, arguments, strict=True)), dict(sorted(shapes.items())))


def _run(graph: Graph, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Value]) -> list[Value]:
    """Adds the equations of a program to the graph, and returns its results."""
    jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {variable: np.asarray(value) for variable, value in zip(jaxpr.constvars, constants, strict=True)}

    def read(atom: Any) -> Value:
        if not isinstance(atom, Literal):
            return known[atom]
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)

    for equation in jaxpr.eqns:
        results = _run_equation(graph, equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_equation(graph: Graph, equation: Any, inputs: list[Value]) -> Sequence[Value]:
    name = equation.primitive.name
    if name in _CALLS:
        return _run(graph, equation.params[_CALLS[name]], inputs)
    if name == "scan":
        return _unrolled(graph, equation, inputs)
    if _is_known(equation, inputs):
        found = equation.primitive.bind(*inputs, **equation.params)
        return [np.asarray(value) for value in (found if equation.primitive.multiple_results else [found])]
    if name not in OPERATORS:
        raise unsupported(equation)
    return [OPERATORS[name](graph, equation, *inputs)]


def _is_known(equation: Any, inputs: list[Value]) -> bool:
    if equation.primitive.name == "dim_as_value":  # the size of the batch
        return False
    sizes = (size for variable in equation.outvars for size in variable.aval.shape)
    return all(isinstance(value, np.ndarray) for value in inputs) and all(isinstance(size, int) for size in sizes)


def _unrolled(graph: Graph, equation: Any, inputs: list[Value]) -> list[Value]:
    """Runs the body of a scan over stacked parameters once for each of them."""
    params = equation.params
    stacked = params["num_consts"] + params["num_carry"]
    constants, carry, rows = inputs[: params["num_consts"]], inputs[params["num_consts"] : stacked], inputs[stacked:]
    has_results = len(equation.outvars) > params["num_carry"]
    if has_results or params["reverse"] or not all(isinstance(value, np.ndarray) for value in rows):
        raise unsupported(equation, " over other values than parameters")
    for index in range(params["length"]):
        carry = _run(graph, params["jaxpr"], [*constants, *carry, *(np.asarray(value[index]) for value in rows)])
    return carry
