"""The configurations of tokenizers, see `lit_het.data_pipelines.texts.tokenizers`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lit_het.errors import UserError

if TYPE_CHECKING:
    from lit_het.data_pipelines.texts.auto_tokenizer import TransformersTokenizer
    from lit_het.data_pipelines.texts.tensorflow_text import TensorFlowTextTokenizer
    from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer


XLM_R_MODEL = "sentencepiece.bpe.model"
"""The name under which `transformers` stores the SentencePiece model of XLM-R, whose ids are those of fairseq."""


@dataclasses.dataclass(frozen=True)
class SentencePieceConfig:
    """A SentencePiece model in a file.

    Attributes:
        model: the ``.model`` file.
        length: tokens per caption, the end token included.
        lowercase: lowercase captions first, if the model was trained so.
        padding_id: None uses the model's own; SigLIP pads with its end token, 1.
        remove_punctuation: drop ASCII punctuation and join white space first, as Hugging Face's SigLIP does.
        split_underscores: make spaces of underscores before that, as open_clip's ``canonicalize`` does.
    """

    model: Path
    length: int = 16
    lowercase: bool = True
    padding_id: int | None = None
    remove_punctuation: bool = False
    split_underscores: bool = False

    def build(self) -> "SentencePieceTokenizer":
        """Reads the model."""
        from lit_het.data_pipelines.texts import tokenizer_files
        from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer

        if self.model.name == XLM_R_MODEL:
            raise UserError(f"{self.model}: XLM-R numbers pieces otherwise than this file; give its tokenizer.json")
        model_bytes = tokenizer_files.read(self.model)
        try:
            return SentencePieceTokenizer(
                model_bytes,
                self.length,
                self.lowercase,
                self.padding_id,
                self.remove_punctuation,
                self.split_underscores,
            )
        except UserError as error:
            raise UserError(f"{self.model}: {error}") from error


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizerConfig:
    """A ``tokenizer.json`` of Hugging Face: BERT's WordPiece, byte pairs of CLIP and RoBERTa, XLM-R's, Gemma's, others.

    Attributes:
        model: the file, or CLIP's ``vocab.json`` with its ``merges.txt`` beside it.
        length: tokens per caption, control tokens included.
        padding_id: None uses the padding that the file configures, or its token ``[PAD]`` or ``<pad>``, or
            CLIP's end token.
        fold_case: lowercase captions first, as SigLIP 2 does before Gemma's tokenizer, if no step of the file does.
    """

    model: Path
    length: int = 16
    padding_id: int | None = None
    fold_case: bool = False

    def build(self) -> "HuggingFaceTokenizer":
        """Reads the file."""
        from lit_het.data_pipelines.texts import tokenizer_files
        from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer

        model_bytes = tokenizer_files.read_hugging_face(self.model, fold_case=self.fold_case)
        try:
            return HuggingFaceTokenizer(model_bytes, self.length, self.padding_id)
        except UserError as error:
            raise UserError(f"{self.model}: {error}") from error


@dataclasses.dataclass(frozen=True)
class TensorFlowTextConfig:
    """A ``vocab.txt`` of BERT, read by TensorFlow Text, which LiT's published BERT towers were trained with.

    Attributes:
        model: the file, one word piece per line.
        length: tokens per caption, control tokens included.
        lowercase: fold case and remove accents first; False for a cased vocabulary.
        end_token: end captions with ``[SEP]``; LiT's own towers were trained without it.
        padding_id: None uses ``[PAD]``.
    """

    model: Path
    length: int = 16
    lowercase: bool = True
    end_token: bool = True
    padding_id: int | None = None

    def build(self) -> "TensorFlowTextTokenizer":
        """Reads the file."""
        from lit_het.data_pipelines.texts import tokenizer_files
        from lit_het.data_pipelines.texts.tensorflow_text import TensorFlowTextTokenizer

        model_bytes = tokenizer_files.read(self.model)
        try:
            return TensorFlowTextTokenizer(model_bytes, self.length, self.lowercase, self.end_token, self.padding_id)
        except UserError as error:
            raise UserError(f"{self.model}: {error}") from error


@dataclasses.dataclass(frozen=True)
class TransformersTokenizerConfig:
    """Any tokenizer of `transformers`, for a kind that the others here do not read; slower.

    Attributes:
        model: the folder of its files; of a run, one file with all of them.
        length: tokens per caption, control tokens included.
        padding_id: None uses the tokenizer's own.
    """

    model: Path
    length: int = 16
    padding_id: int | None = None

    def build(self) -> "TransformersTokenizer":
        """Reads the files."""
        from lit_het.data_pipelines.texts import auto_tokenizer

        model_bytes = auto_tokenizer.read(self.model)
        try:
            return auto_tokenizer.TransformersTokenizer(model_bytes, self.length, self.padding_id)
        except UserError as error:
            raise UserError(f"{self.model}: {error}") from error


TokenizerConfig: TypeAlias = (
    SentencePieceConfig | HuggingFaceTokenizerConfig | TensorFlowTextConfig | TransformersTokenizerConfig
)
