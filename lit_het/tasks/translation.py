"""The configuration of the original Transformer (Vaswani et al. 2017): text of a decoder about a text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lit_het.errors import FieldError, UserError
from lit_het.heads.classification_config import DeterministicConfig, TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.tasks.options import WritingOptions, check_text_tower
from lit_het.towers.decoder_config import START_TOKEN, DecoderConfig
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.text_config import TextConfig

_ENCODER = TextConfig(pooling="none", padding_token=START_TOKEN)


@dataclasses.dataclass(frozen=True)
class TranslationConfig(WritingOptions):
    """A model that writes text about a text: its translation, or another sequence.

    Attributes:
        text_tower: the encoder of source texts, without pooling: the decoder attends to all tokens but padding.
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        locked: patterns of parameters to lock.
        shared_embedding: whether source and target have one embedding of tokens (Vaswani et al. Sec. 3.4).
    """

    text_tower: TextConfig = _ENCODER
    decoder: DecoderConfig = DecoderConfig()
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ()
    shared_embedding: bool = False

    tower_key = "text_tower"
    summary = "A text decoder on a text encoder"
    pipeline_tag = "translation"
    exports = ("lit-het",)

    def __post_init__(self) -> None:
        tower, decoder = self.text_tower, self.decoder
        if tower.pooling != "none":
            raise UserError(
                f"a decoder attends to the tokens of a text: set task.text_tower.pooling to 'none', not "
                f"{tower.pooling!r}"
            )
        if tower.padding_token is None:
            raise UserError(
                "a decoder does not attend to padding: set task.text_tower.padding_token to that of the tokenizer"
            )
        sizes = [(one.vocabulary_size, one.encoder.width) for one in (tower, decoder)]
        if self.shared_embedding and (sizes[0] != sizes[1] or tower.weights is not None):
            raise FieldError(
                self,
                "shared_embedding",
                "True needs equal vocabulary_size and encoder.width of text_tower and decoder, and no weights",
            )
        self.decoder.check_head(self.head, "task")
        self.head.check_loss(self.loss, "task")
        super().__post_init__()

    @property
    def compute_type(self) -> ComputeType:
        """The type of activations, in which locked parameters are held."""
        return self.text_tower.encoder.compute_type

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks that encoder and decoder have the same tokenizer, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        tower = self.text_tower
        check_text_tower(tower, tokenizer)
        if tower.padding_token != tokenizer.padding_id:
            raise UserError(
                f"--task.text-tower.padding-token {tower.padding_token} is not the padding of the tokenizer, "
                f"{tokenizer.padding_id}; make it equal, or set --tokenizer.padding-id"
            )
        if tokenizer.padding_id in (tokenizer.end_id, tokenizer.unknown_id):
            raise UserError(
                f"the padding of the tokenizer, {tokenizer.padding_id}, is also its end token or unknown characters, "
                "which the decoder would not see; set --tokenizer.padding-id and --task.text-tower.padding-token to "
                "another token"
            )

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of texts and their translations, see `TaskOptions`."""
        return super().columns(data) | {"source": jax.ShapeDtypeStruct((self.text_tower.length,), jnp.int32)}
