"""Captions to token ids: SentencePiece (trained in memory or from a file), Hugging Face, TensorFlow Text."""

import contextlib
import io
import os
import string
import time
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import sentencepiece
import tokenizers
from jaxtyping import Bool, Int32

from lit_het.data_pipelines.labels import MAX_TEXT_BYTES
from lit_het.data_pipelines.texts import tokenizer_files
from lit_het.data_pipelines.texts.tokenizers_config import HuggingFaceTokenizerConfig as HuggingFaceTokenizerConfig
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig as SentencePieceConfig
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

_QUIET = 2  # SentencePiece's level for errors only
# Names of the padding token, for a tokenizer.json that does not configure padding; CLIP pads with its end token.
_PADDING_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
# Texts to measure a tokenizer's speed with, and the most seconds that a caption of the largest size may take.
_SPEED_TEST_TEXTS = ("A photo of 2 cats, 1 dog. ", "a", " ", "0", "-")
_MAX_SECONDS = 0.25
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

# The loader's threads tokenise in parallel already.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@runtime_checkable
class Tokenizer(Protocol):
    """Turns captions into token ids of a fixed length.

    Attributes:
        model_bytes: the content of its file, to be stored with a checkpoint.
        length: tokens per caption, control tokens included.
        padding_id: fills the rest of a row.
    """

    model_bytes: bytes
    length: int
    padding_id: int

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of the ids, exclusive."""
        ...

    def __call__(self, captions: list[str]) -> np.ndarray:
        """Returns ids ``[n length]``."""
        ...


def train_sentencepiece(
    captions: Iterable[str],
    *,
    vocabulary_size: int,
    model_type: Literal["unigram", "bpe", "word"] = "unigram",
    lowercase: bool = True,
) -> bytes:
    """Trains a SentencePiece model in memory; equal captions give equal bytes.

    Padding is id 0, end of sequence 1, unknown 2. Every character of the captions is covered. The vocabulary is smaller
    than ``vocabulary_size`` if the captions do not yield that many pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(caption.lower() if lowercase else caption for caption in captions),
            model_writer=model,
            vocab_size=vocabulary_size,
            model_type=model_type,
            character_coverage=1.0,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            max_sentence_length=2 * MAX_TEXT_BYTES,  # longer ones are skipped; lower case may take more bytes
            num_threads=1,  # more threads change the order of floating-point sums, and so the model
            minloglevel=_QUIET,
        )
    except (RuntimeError, ValueError) as error:
        why = f"({' '.join(str(error).split())})"
        raise UserError(f"a vocabulary of {vocabulary_size} pieces cannot be trained {why}; change its size") from error
    return model.getvalue()


class SentencePieceTokenizer:
    """Turns captions into token ids of a fixed length; safe to share between threads.

    The end token is sticky: it ends every caption, even one that was truncated.

    Attributes:
        model_bytes: the serialised model, to be stored with a checkpoint.
        length: tokens per caption.
        lowercase: whether captions are lowercased first.
        padding_id: fills the rest of a row.
        end_id: of the end token.
        unknown_id: stands for every character that the model does not know.
        remove_punctuation: whether ASCII punctuation and repeated white space are removed first.
        split_underscores: whether underscores become spaces before that.
    """

    def __init__(
        self,
        model_bytes: bytes,
        length: int,
        lowercase: bool = True,
        padding_id: int | None = None,
        remove_punctuation: bool = False,
        split_underscores: bool = False,
    ):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            tokenizer_files.check_sentencepiece(model_bytes)
            self._processor.LoadFromSerializedProto(model_bytes)
        except Malformed as error:
            raise UserError(f"is not a SentencePiece model ({error}); train one or copy it again") from error
        except RuntimeError as error:
            raise UserError("is not a SentencePiece model; train one or copy it again") from error
        self.end_id, self.unknown_id = self._processor.eos_id(), self._processor.unk_id()
        if self.end_id < 0:
            raise UserError("the model has no end token; train it with an eos_id")
        self.padding_id = self._processor.pad_id() if padding_id is None else padding_id
        if not 0 <= self.padding_id < self.vocabulary_size:
            raise UserError(f"padding id {self.padding_id} is not in the vocabulary; set padding_id to one that is")
        if length < 1:
            raise UserError(f"a caption of {length} tokens is too short for the end token; set length to 1 or more")
        self.model_bytes = model_bytes
        self.length = length
        self.lowercase = lowercase
        self.remove_punctuation = remove_punctuation
        self.split_underscores = split_underscores

    @property
    def vocabulary_size(self) -> int:
        """Number of pieces, control tokens included."""
        return self._processor.GetPieceSize()

    def __call__(self, captions: list[str]) -> Int32[np.ndarray, "n length"]:
        """Tokenises captions: pieces, the end token, then padding."""
        ids = np.full((len(captions), self.length), self.padding_id, np.int32)
        for row, caption in enumerate(captions):
            pieces = self.pieces(caption)[: self.length - 1]
            ids[row, : len(pieces)] = pieces
            # SigLIP and LiT pool the last position: a caption that is cut must end like any other.
            ids[row, len(pieces)] = self.end_id
        return ids

    def whole(self, texts: list[str]) -> Int32[np.ndarray, "n length"]:
        """Tokenises texts as a call does, and cuts none."""
        for number, text in enumerate(texts, 1):
            if (count := len(self.pieces(text)) + 1) > self.length:
                raise UserError(
                    f"text {number}, {text[:100]!r}, has {count} tokens, its end included, and {self.length} are read; "
                    "shorten it, or set --tokenizer.length before training"
                )
        return self(texts)

    def prompted(
        self, prompts: list[str], texts: list[str]
    ) -> tuple[Int32[np.ndarray, "n length"], Bool[np.ndarray, "n length"]]:
        """Tokenises prompts and the texts after them: pieces of both, the end token, then padding.

        Returns:
            The ids, and which of them are to be learned: those of the text, which may be cut, and the end token.
        """
        ids = np.full((len(prompts), self.length), self.padding_id, np.int32)
        target = np.zeros(ids.shape, bool)
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            before = self.pieces(prompt)
            if len(before) > self._longest_prompt:
                raise UserError(
                    f"the prompt {prompt[:100]!r} has {len(before)} tokens, too many for {self.length}; shorten it, "
                    "or set --tokenizer.length"
                )
            pieces = [*before, *self.pieces(text)][: self.length - 1]
            ids[row, : len(pieces)] = pieces
            ids[row, len(pieces)] = self.end_id
            target[row, len(before) : len(pieces) + 1] = True
        return ids, target

    def fits(self, prompt: str) -> bool:
        """Returns whether a prompt leaves room for a token of text and the end token."""
        return len(self.pieces(prompt)) <= self._longest_prompt

    @property
    def _longest_prompt(self) -> int:
        # It leaves room for a token of text and the end token.
        return self.length - 2

    def pieces(self, text: str) -> list[int]:
        """Returns the ids of a text's pieces, all of them and without control tokens."""
        return self._processor.EncodeAsIds(self._prepared(text))

    def piece(self, number: int) -> str:
        """Returns the text of a piece, with a space where a word begins; empty for the end token."""
        return "" if number == self.end_id else self._processor.IdToPiece(number).replace("▁", " ")

    def _prepared(self, caption: str) -> str:
        caption = tokenizer_files.truncate(caption)
        text = caption.lower() if self.lowercase else caption
        text = text.replace("_", " ") if self.split_underscores else text
        return " ".join(text.translate(_NO_PUNCTUATION).split()) if self.remove_punctuation else text

    def decode(self, ids: Int32[np.ndarray, "n length"]) -> list[str]:
        """Turns token ids back into text, without control tokens."""
        return [self._processor.DecodeIds([int(i) for i in row if i != self.padding_id]) for row in ids]


class HuggingFaceTokenizer:
    """Turns captions into token ids with the file's normalisation and control tokens; truncation keeps the latter.

    Attributes:
        model_bytes: the content of the file.
        length: tokens per caption.
        padding_id: fills the rest of a row.
    """

    def __init__(self, model_bytes: bytes, length: int, padding_id: int | None = None):
        with _one_line_errors("is not a tokenizer.json"), tokenizer_files.silenced_stderr():
            tokenizer_files.check_hugging_face(model_bytes)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(model_bytes)
            control = self._tokenizer.num_special_tokens_to_add(is_pair=False)
            self._vocabulary_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if length <= control:
            raise UserError(f"{length} tokens are too few for {control} control tokens and a caption; increase length")
        self.model_bytes, self.length = model_bytes, length
        self.padding_id = self._own_padding() if padding_id is None else padding_id
        token = self._tokenizer.id_to_token(self.padding_id)
        if token is None:
            raise UserError(f"padding id {self.padding_id} is not in the vocabulary; set padding_id to one that is")
        with tokenizer_files.silenced_stderr():
            self._tokenizer.enable_truncation(length)
            self._tokenizer.enable_padding(length=length, pad_id=self.padding_id, pad_token=token)
            self._check_speed()

    def id_of(self, token: str) -> int:
        """Returns the id of a token; raises a `UserError` if it is not in the vocabulary."""
        if (number := self._tokenizer.token_to_id(token)) is None:
            raise UserError(f"the padding token {token!r:.100} is not in the vocabulary; set padding_id")
        return number

    def _check_speed(self) -> None:
        """Checks that the tokenizer works and is fast: its regular expressions may take exponential time.

        Captions grow from short to long, so that a slow tokenizer is found early.
        """
        size = 8
        while size <= tokenizer_files.MAX_CAPTION_CHARACTERS:
            for text in _SPEED_TEST_TEXTS:
                caption = text * (size // len(text) + 1)
                seconds = self._seconds(caption)
                # Measured twice, as other threads may have been busy.
                if seconds > _MAX_SECONDS and (seconds > 1 or self._seconds(caption) > _MAX_SECONDS):
                    raise UserError(f"takes {seconds:.1f} s for {size} characters; use another tokenizer")
            size = size * 3 // 2

    def _seconds(self, caption: str) -> float:
        # CPU time: in wall time a busy machine or a slow disk would look like a slow tokenizer.
        began = time.process_time()
        self([caption])
        return time.process_time() - began

    def _own_padding(self) -> int:
        if self._tokenizer.padding is not None:
            return self._tokenizer.padding["pad_id"]
        found = (self._tokenizer.token_to_id(name) for name in _PADDING_NAMES)
        padding_id = next((number for number in found if number is not None), None)
        if padding_id is None:
            raise UserError("has no padding token; set padding_id")
        return padding_id

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id, control tokens included."""
        return self._vocabulary_size

    def __call__(self, captions: list[str]) -> Int32[np.ndarray, "n length"]:
        """Tokenises captions."""
        with _one_line_errors("the tokenizer.json fails"):
            encodings = self._tokenizer.encode_batch([tokenizer_files.truncate(caption) for caption in captions])
        ids = [encoding.ids for encoding in encodings]
        if any(len(row) != self.length or max(row) >= self.vocabulary_size for row in ids):
            raise UserError(
                f"the tokenizer.json does not make {self.length} ids of its vocabulary; use another tokenizer"
            )
        return np.array(ids, np.int32).reshape(len(captions), self.length)


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turns the library's exceptions, and the panics of its Rust code, into one-line errors."""
    try:
        yield
    except BaseException as error:
        # Panics of tokenizers 0.23 (Rust) derive from BaseException, and their class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{what} ({reason}); use the one that comes with the model's weights") from error
