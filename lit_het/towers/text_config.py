"""The configurations of text towers."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lit_het.errors import FieldError, UserError, require_at_least, require_choice, require_share
from lit_het.towers.base import TowerOptions
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.tuning_config import Tuning

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.bert import Bert
    from lit_het.towers.modern_bert import ModernBert
    from lit_het.towers.t5 import T5
    from lit_het.towers.text import TextTransformer


@dataclasses.dataclass(frozen=True)
class TextConfig(TowerOptions):
    """A text Transformer.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        embedding_size: size of the projected embedding; with an uncertainty token it holds the mean and log σ².
        encoder: the stack of blocks.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        pooling: the last position (the tokenizer's end token or padding), the first one, the mean or the maximum over
            all positions, attention pooling, the end token (CLIP), a learned token behind the text (ProLIP), or "none",
            for a decoder that attends to all tokens; ``embedding_size`` is then not used.
        end_token: its id, for the pooling "end_token": the first occurrence is pooled. None for the largest id of each
            text, as CLIP's authors do.
        positions: learned, or fixed sines and cosines (the original Transformer, whose encoder has the activation
            "relu" and norms after layers).
        uncertainty_token: whether one more learned token is encoded behind the text, whose output gives log σ² of the
            embedding (ProLIP's [UNC]); the embedding is then ``[mean, log σ²]``.
        uncertainty_from: what the layer of log σ² reads: that token, or the mean, as in ProLIP's published code.
        layer_input: whether the embedding is followed by the input of its projection, for a posterior of it.
        padding_token: its id, if no token attends to padding; None where the tower learns to ignore it, as in LiT.
        scaled_embedding: whether embeddings of tokens are multiplied by the root of the width (Vaswani et al.).
        dropout: rate at which embeddings, and outputs of layers before they are added, are dropped in training.
        attention_dropout: rate at which attention weights are dropped in training.
        tuning: which parameters of a pretrained tower are trained; None for all that the task does not lock.
    """

    vocabulary_size: int = 32_000
    length: int = 16
    embedding_size: int = 768
    encoder: EncoderConfig = EncoderConfig()
    weights: str | None = None
    pooling: Literal["last", "first", "mean", "max", "attention", "end_token", "class_token", "none"] = "last"
    end_token: int | None = None
    positions: Literal["learned", "sinusoidal"] = "learned"
    uncertainty_token: bool = False
    uncertainty_from: Literal["token", "mean"] = "token"
    layer_input: bool = False
    padding_token: int | None = None
    scaled_embedding: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tuning: Tuning | None = None

    first_parameters = ("tokens", "positions", "class_token", "uncertainty_token")

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length", "embedding_size")
        require_choice(self, "pooling", "positions", "uncertainty_from")
        if self.end_token is not None and self.pooling != "end_token":
            raise UserError(f"end_token = {self.end_token} needs pooling = 'end_token', not {self.pooling!r}")
        if self.end_token is not None and not 0 <= self.end_token < self.vocabulary_size:
            raise UserError(
                f"end_token = {self.end_token} is not below the vocabulary of {self.vocabulary_size} tokens"
            )
        if self.uncertainty_token and self.embedding_size % 2:
            raise UserError(f"embedding_size = {self.embedding_size} must be even: its second half is log σ²")
        if self.pooling == "none" and (self.uncertainty_token or self.layer_input):
            raise UserError("pooling = 'none' has no embedding; leave out uncertainty_token and layer_input")
        if self.layer_input and self.last_layer is None:
            raise FieldError(self, "layer_input", "True needs uncertainty_token = False")
        require_share(self, "dropout", "attention_dropout")
        for field in ("dropout", "attention_dropout"):
            if (rate := getattr(self, field)) and self.encoder.experts is not None:
                raise FieldError(self, field, f"{rate} must be 0 beside experts, which have their own")
        if self.encoder.num_members > 1:
            raise UserError(
                f"a text tower has one embedding per text: num_members = {self.encoder.num_members} must be 1"
            )

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the projection; None without one, or where log σ² follows it."""
        return None if self.uncertainty_token or self.pooling == "none" else "projection"

    @property
    def masked_token(self) -> int | None:
        """Id of the token to which no other attends; None where all are seen."""
        return self.padding_token

    @property
    def pools_tokens(self) -> bool:
        """Whether its tokens can be read beside an embedding."""
        return self.pooling != "none"

    def file_options(self) -> dict[str, Any]:
        """Returns its length too, and a pooling that a file may not record."""
        pooling = {} if self.pooling == "attention" else {"text_pooling": self.pooling}
        return {**super().file_options(), "text_length": self.length, **pooling}

    def build(self, rngs: "nnx.Rngs") -> "TextTransformer":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.text import TextTransformer

        return TextTransformer(self, rngs)


class MaskedTextOptions(TowerOptions):
    """What the configuration of a text tower says whose tokens do not attend to padding.

    Attributes:
        length: tokens per text, padding included.
        padding_id: token id of padding.
        projection_size: size of the dense layer at the very end; None for none.
    """

    length: Any
    padding_id: Any

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length")
        if self.projection_size is not None:
            require_at_least(1, self, "projection_size")
        if self.encoder.num_members > 1:
            raise UserError(f"a {type(self).__name__} has no ensemble of experts; set encoder.experts.num_members to 1")
        if self.layer_input and self.last_layer is None:
            raise FieldError(self, "layer_input", "True needs a projection_size")

    @property
    def masked_token(self) -> int:
        """Id of the token to which no other attends."""
        return self.padding_id

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        return self.projection_size or self.encoder.width

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the projection; None without one."""
        return None if self.projection_size is None else "projection"

    def file_options(self) -> dict[str, Any]:
        """Returns its length too, and a pooling that a file may not record; one before a pooler is the file's own."""
        pooling = {} if self.pooler else {"text_pooling": self.pooling}
        return {**super().file_options(), "text_length": self.length, **pooling}


@dataclasses.dataclass(frozen=True)
class BertConfig(MaskedTextOptions):
    """A BERT text tower, and with other fields a RoBERTa or XLM-R.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        projection_size: size of the dense layer at the very end; None for none (BERT as published).
        encoder: the stack of blocks, with norms after layers.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        num_segments: number of segment embeddings; all texts here are segment 0.
        padding_id: token id of padding, which is masked in attention.
        pooler: whether the first token goes through BERT's dense layer with tanh before the projection (not in LiT).
        layer_input: whether the embedding is followed by the input of the projection, for a posterior of it.
        tuning: which parameters of a pretrained tower are trained; None for all that the task does not lock.
        mean_pooling: whether the embedding is of the mean of all tokens but padding (models of sentence-transformers),
            and not of the first token.
    """

    vocabulary_size: int = 30_522
    length: int = 16
    projection_size: int | None = 768
    encoder: EncoderConfig = EncoderConfig(norm_placement="after", activation="gelu", norm_epsilon=1e-12)
    weights: str | None = None
    num_segments: int = 2
    padding_id: int = 0
    pooler: bool = False
    layer_input: bool = False
    tuning: Tuning | None = None
    mean_pooling: bool = False

    first_parameters = ("tokens", "positions", "segments", "input_norm")

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_segments")
        if self.encoder.norm_placement != "after":
            raise UserError("a BERT tower needs encoder.norm_placement = 'after'")
        if self.pooler and self.mean_pooling:
            raise FieldError(self, "pooler", "True needs mean_pooling = False")
        super().__post_init__()

    @property
    def pooling(self) -> Literal["first", "mean"]:
        """How its tokens become an embedding."""
        return "mean" if self.mean_pooling else "first"

    def build(self, rngs: "nnx.Rngs") -> "Bert":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.bert import Bert

        return Bert(self, rngs)


@dataclasses.dataclass(frozen=True)
class T5Config(MaskedTextOptions):
    """The encoder of a T5 or mT5 as a text tower, by default of T5 v1.1 base.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        projection_size: size of the dense layer at the very end; None for none.
        encoder: the stack of blocks.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        padding_id: token id of padding, which is masked in attention.
        pooling: the mean of all tokens but padding, or the first token.
        num_buckets: of distances between tokens, each with a learned bias per head, in both directions.
        max_distance: from which on all distances are in one bucket.
        layer_input: whether the embedding is followed by the input of the projection, for a posterior of it.
        tuning: which parameters of a pretrained tower are trained; None for all that the task does not lock.
    """

    vocabulary_size: int = 32_128
    length: int = 16
    projection_size: int | None = 768
    encoder: EncoderConfig = EncoderConfig(mlp_width=2048, activation="geglu_tanh", norm="rms")
    weights: str | None = None
    padding_id: int = 0
    pooling: Literal["mean", "first"] = "mean"
    num_buckets: int = 32
    max_distance: int = 128
    layer_input: bool = False
    tuning: Tuning | None = None

    first_parameters = ("tokens", "distances")

    def __post_init__(self) -> None:
        require_choice(self, "pooling")
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise FieldError(self, "num_buckets", f"{self.num_buckets} must be a multiple of 4")
        require_at_least(self.num_buckets // 4 + 1, self, "max_distance")
        if self.encoder.experts is not None:
            raise UserError("a T5 tower has no experts; leave out encoder.experts")
        super().__post_init__()

    def build(self, rngs: "nnx.Rngs") -> "T5":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.t5 import T5

        return T5(self, rngs)


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(MaskedTextOptions):
    """A ModernBERT text tower, by default of its base size: rotary positions, and blocks that see neighbours only.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        projection_size: size of the dense layer at the very end; None for none.
        encoder: the stack of blocks.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        padding_id: token id of padding, which is masked in attention.
        pooling: the first token, or the mean of all tokens but padding.
        global_every: of so many blocks, the first one attends to all tokens, the others to neighbours.
        window: neighbours are at most half of it away.
        global_base, local_base: ratios of frequencies of rotary positions, in either kind of block.
        layer_input: whether the embedding is followed by the input of the projection, for a posterior of it.
        tuning: which parameters of a pretrained tower are trained; None for all that the task does not lock.
    """

    vocabulary_size: int = 50_368
    length: int = 16
    projection_size: int | None = 768
    encoder: EncoderConfig = EncoderConfig(
        depth=22, mlp_width=1152, activation="geglu", norm_epsilon=1e-5, first_norm=False
    )
    weights: str | None = None
    padding_id: int = 50_283
    pooling: Literal["first", "mean"] = "first"
    global_every: int = 3
    window: int = 128
    global_base: float = 160_000.0
    local_base: float = 10_000.0
    layer_input: bool = False
    tuning: Tuning | None = None

    first_parameters = ("tokens", "input_norm")

    def __post_init__(self) -> None:
        require_choice(self, "pooling")
        require_at_least(1, self, "global_every", "window", "global_base", "local_base")
        if self.encoder.experts is not None:
            raise UserError("a ModernBERT tower has no experts; leave out encoder.experts")
        if (size := self.encoder.size_of_head) % 2:
            raise UserError(f"rotary positions of a ModernBERT tower need heads of an even size, not {size}")
        super().__post_init__()

    def build(self, rngs: "nnx.Rngs") -> "ModernBert":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.modern_bert import ModernBert

        return ModernBert(self, rngs)


TextTowerConfig: TypeAlias = TextConfig | BertConfig | T5Config | ModernBertConfig
