"""The configuration of the stack of blocks of all Transformers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from lit_het import parameters
from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.types import Params

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.attention import Attention
    from lit_het.towers.layers import Mlp

ComputeType: TypeAlias = Literal["float32", "bfloat16"]

# "gelu" is exact, "gelu_tanh" its tanh form (big_vision, SigLIP), "quick_gelu" x sigmoid(1.702 x) (CLIP); "swiglu" has
# a gate beside the hidden layer: silu(gate x) * (up x) (DINOv2 giant); "geglu", "geglu_tanh" one by either GELU (T5).
Activation: TypeAlias = Literal["gelu_tanh", "gelu", "quick_gelu", "relu", "swiglu", "geglu", "geglu_tanh"]


LOWER = "lower_"
"""Before the name of a stack of blocks: the stack of the blocks below those that are trained."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape and execution of a stack of Transformer blocks.

    Attributes:
        width: size of a token.
        depth: number of blocks.
        mlp_width: size of the hidden layer of the MLPs.
        num_heads: attention heads; divides ``width``, unless ``head_size`` is given.
        activation: of the MLPs.
        norm_placement: LayerNorms before each layer and after the last block (ViT), or after each residual sum (the
            original Transformer, BERT).
        norm_epsilon: added to variances.
        norm: LayerNorms, or their form without mean and bias (RMSNorm, Zhang and Sennrich 2019; T5).
        head_size: size of an attention head; None for ``width / num_heads``.
        first_norm: whether there is a norm before the attention of the first block (not in ModernBERT).
        layer_scale: whether a learned vector scales the output of each layer before the residual sum (DINOv2).
        initial_layer_scale: its entries at first; with small ones a block starts as the identity.
        causal: whether a token attends only to itself and to earlier tokens (CLIP's texts).
        experts: mixtures of experts in place of some MLPs, or None.
        compute_type: type of activations; parameters are float32.
        unrolled: whether to compile every block separately, with faster steps on CPUs and GPUs; otherwise a scan over
            blocks, which compiles fast at any depth. Parameters are the same.
        remat: what the backward pass recomputes: nothing, all but matrix products, or everything.
    """

    width: int = 768
    depth: int = 12
    mlp_width: int = 3072
    num_heads: int = 12
    activation: Activation = "gelu_tanh"
    norm_placement: Literal["before", "after"] = "before"
    norm_epsilon: float = 1e-6
    norm: Literal["layer", "rms"] = "layer"
    head_size: int | None = None
    first_norm: bool = True
    layer_scale: bool = False
    initial_layer_scale: float = 1.0
    causal: bool = False
    experts: ExpertsConfig | None = None
    compute_type: ComputeType = "float32"
    unrolled: bool = False
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self) -> None:
        require_at_least(1, self, "width", "depth", "mlp_width", "num_heads")
        require_choice(self, "activation", "norm_placement", "norm", "compute_type", "remat")
        if self.head_size is not None:
            require_at_least(1, self, "head_size")
        elif self.width % self.num_heads:
            raise UserError(f"encoder.width = {self.width} is not a multiple of encoder.num_heads = {self.num_heads}")
        if self.experts is not None:
            self.experts.block_numbers(self.depth)
        if not self.first_norm and (self.experts is not None or self.norm_placement == "after"):
            raise UserError("encoder.first_norm = False needs norm_placement = 'before' and no experts; leave it out")

    @property
    def num_members(self) -> int:
        """M: outputs of the encoder per example (e3), in evaluation."""
        return 1 if self.experts is None else self.experts.num_predictions

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the blocks in each stack of parameters, by its name."""
        with_experts = () if self.experts is None else self.experts.block_numbers(self.depth)
        plain = tuple(number for number in range(self.depth) if number not in with_experts)
        return {name: numbers for name, numbers in {"blocks": plain, "expert_blocks": with_experts}.items() if numbers}

    @property
    def size_of_head(self) -> int:
        """Size of an attention head."""
        return self.head_size or self.width // self.num_heads

    def build_attention(
        self, rngs: "nnx.Rngs", source_width: int | None = None, num_heads: int | None = None
    ) -> "Attention":
        """Returns the attention of a block to its own tokens, or to those of another tower."""
        from lit_het.towers.attention import Attention

        heads = num_heads or self.num_heads
        return Attention(self.width, heads, self.compute_type, rngs, source_width, self.head_size)

    def build_norm(self, rngs: "nnx.Rngs") -> "nnx.LayerNorm | nnx.RMSNorm":
        """Returns a norm of tokens, which computes in float32 for any type of activations."""
        from lit_het.towers.layers import norm

        return norm(self.norm, self.width, self.norm_epsilon, rngs)

    def build_mlp(self, rngs: "nnx.Rngs", layer: Callable[..., Any] | None = None) -> "Mlp":
        """Returns the MLP of a block, or of one expert, of dense layers of a kind."""
        from lit_het.towers.layers import Mlp, linear

        return Mlp(self.width, self.mlp_width, self.activation, self.compute_type, rngs, layer or linear)


def layers_above(config: EncoderConfig, inputs: Sequence[str], params: Params) -> Params:
    """Returns the number of layers between each parameter of a tower and the layers after its last block.

    Args:
        config: configuration of the tower's ``encoder``.
        inputs: names of the tower's parameters before the encoder, which count as one layer.
        params: parameters of the tower, or a part of them.

    Returns:
        A tree of numbers: ``depth + 1`` for inputs, ``depth`` to 1 for blocks, 0 after them. Stacked blocks have an
        array ``[blocks 1 ...]``.
    """

    def above(path: str, param: Any) -> int | np.ndarray:
        # Plain and expert blocks are stacked apart, so the position in a stack is not the position in the tower.
        for stack, numbers in config.stacks.items():
            # Of a tower that is trained in part, those of the last blocks, and of the blocks below them.
            for start, part in (("", numbers[-len(param) :]), (LOWER, numbers[: len(param)])) if param.ndim else ():
                if path.startswith(f"encoder/{start}{stack}/"):
                    return config.depth - np.reshape(part, (-1,) + (1,) * (param.ndim - 1))
        return config.depth + 1 if path.split("/")[0] in inputs else 0

    return parameters.unflatten({path: above(path, param) for path, param in parameters.flatten(params).items()})
