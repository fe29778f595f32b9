"""Reads one tower of a Hugging Face model: its arrays, and its sizes from arrays and configuration."""

import dataclasses
import re
from typing import Any, Literal

import numpy as np

from lit_het.errors import UserError
from lit_het.towers.encoder_config import Activation, ComputeType, EncoderConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.processor import VIT_PROCESSOR, Json
from lit_het.weights.rename import ParameterSource, Rule
from lit_het.weights.sources import Arrays

# Names of our nonlinearities in `transformers`.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
# Fields by which layers have no bias.
_BIASES = {
    "qkv_bias": r"/attention/(query|key|value)/kernel$",
    "query_bias": r"/attention/query/kernel$",
    "key_bias": r"/attention/key/kernel$",
    "value_bias": r"/attention/value/kernel$",
    "proj_bias": r"/attention/out/kernel$",
    "mlp_bias": r"/mlp/(gate|up|down)/kernel$",
    "norm_bias": r"norm/scale$",
}
# A larger number in a configuration is refused.
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of towers with the same names and defaults.

    Attributes:
        table: names of the parameters.
        prefix: of the names inside a larger model.
        activation, epsilon: defaults for a configuration without them.
        num_heads: default number of attention heads.
        keeps_corners: whether positions are resampled with aligned corners, see `resample_positions`.
        takes_any_shape: whether images keep their aspect ratio.
        processor: default image processor for a folder without one.
        ignored: rules for arrays that are deliberately not imported.
        defaults: of other fields of a configuration, where they are not those of the first families.
    """

    table: names.Table
    prefix: str
    activation: str = "gelu"
    epsilon: float = 1e-12
    num_heads: int = 12
    keeps_corners: bool = True
    takes_any_shape: bool = False
    processor: Json = dataclasses.field(default_factory=lambda: VIT_PROCESSOR)
    ignored: tuple[Rule, ...] = ()
    defaults: Json = dataclasses.field(default_factory=dict)


class Tower:
    """The arrays of one tower, by names without the prefix of the tower, which a file may or may not have."""

    def __init__(
        self, arrays: Arrays, family: Family, config: Json, compute_type: ComputeType, path: str, outer: str = ""
    ):
        # A tower that was saved alone has names without the prefix of the whole model; a tower that another model
        # contains (``outer``) may have both prefixes.
        inner = outer + family.prefix
        self.prefix = inner if any(name.startswith(inner) for name in arrays) else outer
        self.arrays, self.family, self.config, self.path = arrays, family, family.defaults | config, path
        self.compute_type: ComputeType = compute_type
        self.sources = names.parameter_sources(arrays, family.table, self.prefix, path)
        for field, layers in _BIASES.items():
            if self.config.get(field) is False:
                self.sources += [zero_bias(one) for one in self.sources if re.search(layers, one.target)]
        self.array_names = {one.target.removeprefix(path): one.array_names[0] for one in self.sources}

    def find(self, *candidates: str) -> str | None:
        """Returns the full name of the first candidate in the file, or None."""
        return next((self.prefix + name for name in candidates if self.prefix + name in self.arrays), None)

    def require(self, *candidates: str) -> str:
        """Returns the full name of the first candidate in the file, or raises a `UserError`."""
        found = self.find(*candidates)
        if found is None:
            raise UserError(f"the source has no array {self.prefix}{candidates[0]}; is the file complete?")
        return found

    def shape(self, target: str, *ranks: int) -> tuple[int, ...]:
        """Returns the shape of a parameter's array; another number of axes than ``ranks`` is a `UserError`."""
        if target not in self.array_names:
            raise UserError(f"the source has no array for {self.path}{target}; is the file complete?")
        return shape_of(self.arrays, self.array_names[target], *ranks)

    def encoder(
        self, norm_placement: Literal["before", "after"] = "before", *, causal: bool = False, **others: Any
    ) -> EncoderConfig:
        """Returns the configuration of the blocks, with other fields that its arrays and its configuration lack."""
        width, mlp_width = self.shape("encoder/blocks/0/mlp/down/kernel", 2)
        activation = str(self.config.get("hidden_act", self.family.activation))
        gated = "encoder/blocks/0/mlp/gate/kernel" in self.array_names
        if gated and self.config.get("use_gated_mlp") and activation != "silu":
            raise UserError(
                f"config.json: hidden_act = {activation!r:.100} of a gated MLP is not supported, only 'silu'"
            )
        if not gated and activation not in ACTIVATIONS:
            raise UserError(
                f"config.json: hidden_act = {activation!r:.100} is not supported; choose from {', '.join(ACTIVATIONS)}"
            )
        depth = number(self.config, "num_hidden_layers", 12)
        # A number in a damaged configuration must not decide how much memory a model takes.
        if depth > len(self.arrays):
            raise UserError(f"config.json: num_hidden_layers = {depth}, but the source has {len(self.arrays)} arrays")
        found: dict[str, Any] = {
            "activation": "swiglu" if gated else ACTIVATIONS[activation],
            "norm_epsilon": number(self.config, "layer_norm_eps", self.family.epsilon),
            "layer_scale": "encoder/blocks/0/mlp_scale" in self.array_names,
        }
        return EncoderConfig(
            width,
            depth,
            mlp_width,
            number(self.config, "num_attention_heads", self.family.num_heads),
            norm_placement=norm_placement,
            causal=causal,
            compute_type=self.compute_type,
            **found | others,
        )


def zero_bias(factor: ParameterSource) -> ParameterSource:
    """Returns the source of the bias of a layer without one, from that of its kernel or scale."""

    def zeros(*arrays: np.ndarray) -> np.ndarray:
        return np.zeros(factor.combine(*arrays).shape[-1], np.float32)

    return ParameterSource(re.sub(r"\w+$", "bias", factor.target), factor.array_names, zeros)


def without_bias(name: str, path: str) -> list[ParameterSource]:
    """Returns the sources of a dense layer from its only array; it has no bias, so ours is zero."""
    kernel = ParameterSource(f"{path}/kernel", (name,), np.transpose)
    return [kernel, zero_bias(kernel)]


def shape_of(arrays: Arrays, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns the shape of an array; another number of axes than ``ranks`` is a `UserError`."""
    shape = arrays[name].shape
    if len(shape) not in ranks:
        raise UserError(f"{name} has shape {shape}, where {' or '.join(map(str, ranks))} axes are expected")
    return shape


def number(config: Json, field: str, default: int | float) -> Any:
    """Returns a number of config.json, which must be an integer if the default is one."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, type(default))) or not 0 <= value <= _LARGEST:
        what = f"{'an integer' if isinstance(default, int) else 'a number'} from 0 to {_LARGEST:,}"
        raise UserError(f"config.json: {field} = {value!r:.100} is not {what}")
    return type(default)(value)


def section(config: Json, field: str, default: Json) -> Json:
    """Returns an object in config.json, or the default for one without the field."""
    value = config.get(field, default)
    if not isinstance(value, dict):
        raise UserError(f"config.json: {field} = {value!r:.100} is not an object")
    return value
