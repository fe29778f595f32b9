"""The configuration of a text decoder."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from lit_het.errors import UserError, require_at_least, require_choice, require_share
from lit_het.towers.encoder_config import EncoderConfig, layers_above
from lit_het.types import Params

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.decoder import Decoder

START_TOKEN = 0
"""The input from which the first token of a text is predicted: padding, as in T5 and big_vision."""

# Parameters of the decoder before its blocks.
_INPUTS = ("tokens", "positions")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A text decoder.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text: the prompt, the answer and its end token.
        encoder: shape of the stack of blocks, whose attention is causal.
        positions: learned, or fixed sines and cosines (the original Transformer).
        scaled_embedding: whether embeddings of tokens are multiplied by the root of the width (Vaswani et al.).
        tied_output: whether the kernel of the logits is the embedding of tokens.
        dropout: rate at which embeddings, and outputs of layers before they are added, are dropped in training.
        attention_dropout: rate at which attention weights are dropped in training.
    """

    vocabulary_size: int = 32_000
    length: int = 64
    encoder: EncoderConfig = EncoderConfig(depth=2, causal=True)
    positions: Literal["learned", "sinusoidal"] = "learned"
    scaled_embedding: bool = False
    tied_output: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length")
        require_choice(self, "positions")
        require_share(self, "dropout", "attention_dropout")
        if not self.encoder.causal or self.encoder.experts is not None or self.encoder.layer_scale:
            raise UserError(
                "a decoder needs encoder.causal = True, and has no experts and no layer_scale; leave these out"
            )

    def check_tokenizer(self, tokenizer: Any, prompt: str | None, flag: str) -> None:
        """Checks that there are texts to write, and tokens for them.

        Args:
            tokenizer: of the texts; None without.
            prompt: ``data.prompt``.
            flag: of the decoder, for messages.
        """
        if tokenizer is None or prompt is None:
            raise UserError(
                "a decoder needs texts: name a `tokenizer`, and set `data.prompt`, '' for no prompt, in the "
                "configuration file"
            )
        if tokenizer.length != self.length or tokenizer.vocabulary_size > self.vocabulary_size:
            raise UserError(
                f"the tokenizer has length {tokenizer.length} and {tokenizer.vocabulary_size} tokens, the decoder has "
                f"length {self.length} and {self.vocabulary_size} tokens; set --tokenizer.length and {flag}.length, or "
                f"{flag}.vocabulary-size"
            )

    def check_head(self, head: Any, field: str) -> None:
        """Checks that tied logits fit the head of a field."""
        if self.tied_output and head.zero_kernel:
            raise UserError(
                f"{field}.decoder.tied_output has no kernel to be zero; set {field}.head.zero_kernel to False"
            )
        if self.tied_output and not head.get_logits.is_linear:
            raise UserError(f"{field}.decoder.tied_output is itself {field}.head.get_logits; leave one of them out")

    def build(self, source_width: int, rngs: "nnx.Rngs") -> "Decoder":
        """Returns the decoder for sources of a width, with fresh parameters."""
        from lit_het.towers.decoder import Decoder

        return Decoder(self, source_width, rngs)

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each parameter, see `encoder_config.layers_above`."""
        return layers_above(self.encoder, _INPUTS, params)
