"""An ONNX graph that is being written, and its file."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Of 2024, so that runtimes of the last years read the files.
_OPSET, _IR_VERSION = 21, 10
# A file of protocol buffers has at most 2 GiB; beyond that parameters lie in a second file.
MAX_BYTES = 2**31 - 2**24
# Constants of at most so many bytes are stored once for equal values, larger ones once for the same array.
_SHARED_BYTES = 64

Value: TypeAlias = np.ndarray | str
"""An array that is known before the graph runs, or the name of a tensor."""
Dimension: TypeAlias = Any
"""A number, or an expression of JAX in the symbolic size of the batch."""


class Graph:
    """Nodes and parameters of a graph whose inputs share one symbolic leading dimension.

    Args:
        batch: the symbolic size.
        first_input: name of an input with this size.
    """

    def __init__(self, batch: Dimension, first_input: str):
        self._batch, self._first_input = batch, first_input
        self._nodes: list[onnx.NodeProto] = []
        self._names: dict[Hashable, str] = {}
        self._arrays: list[np.ndarray] = []  # kept, as another array could else get the id of one
        self._batch_size: str | None = None

    def add(self, operator: str, *inputs: Value, name: str | None = None, **attributes: Any) -> str:
        """Adds a node of an ONNX operator with one output, and returns the name of the output."""
        name = name or f"x{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, [self._name(value) for value in inputs], [name], **attributes))
        return name

    def cast(self, value: Value, dtype: Any) -> str:
        """Returns a value converted to a NumPy type."""
        return self.add("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def shape(self, dimensions: Sequence[Dimension]) -> Value:
        """Returns a shape as a vector."""
        if all(isinstance(dimension, int) for dimension in dimensions):
            return np.array(dimensions, np.int64)
        return self.add("Concat", *(self._size(dimension) for dimension in dimensions), axis=0)

    def finish(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> onnx.ModelProto:
        """Returns the model; the values of ``outputs`` have the shapes and types of its tensors."""
        graph = helper.make_graph(
            self._nodes,
            "lit_het",
            [self._tensor(name, aval) for name, aval in inputs.items()],
            [self._tensor(name, aval) for name, aval in outputs.items()],
            [numpy_helper.from_array(value, f"p{number}") for number, value in enumerate(self._arrays)],
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="lit-het"
        )

    def _size(self, dimension: Dimension) -> Value:
        if isinstance(dimension, int):
            return np.array([dimension], np.int64)
        if self._batch_size is None:
            self._batch_size = self.add("Shape", self._first_input, start=0, end=1)
        factor = dimension // self._batch
        assert isinstance(factor, int), f"the dimension {dimension} is not a multiple of the batch"
        return self.add("Mul", self._batch_size, np.array([factor], np.int64))

    def _name(self, value: Value) -> str:
        if isinstance(value, str):
            return value
        key = (value.dtype.str, value.shape, value.tobytes()) if value.nbytes <= _SHARED_BYTES else id(value)
        if key not in self._names:
            self._names[key] = f"p{len(self._arrays)}"
            self._arrays.append(value)
        return self._names[key]

    def _tensor(self, name: str, aval: Any) -> onnx.ValueInfoProto:
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(aval.dtype)), shape)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model to a file, with large parameters in ``<name>.data`` beside it, and checks it."""
    is_large = sum(len(parameter.raw_data) for parameter in model.graph.initializer) > MAX_BYTES
    onnx.save_model(model, path, save_as_external_data=is_large, location=f"{path.name}.data")
    onnx.checker.check_model(str(path), full_check=True)
