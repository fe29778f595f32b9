"""BERT's WordPiece tokenizer by TensorFlow Text; the only module that imports TensorFlow, and only on first use."""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32

from lit_het.data_pipelines.texts import tokenizer_files
from lit_het.errors import UserError
from lit_het.untrusted import Malformed


class TensorFlowTextTokenizer:
    """Turns captions into ``[CLS]``, word pieces, ``[SEP]`` and padding; safe to share between threads.

    Attributes:
        model_bytes: the content of the file.
        length: tokens per caption.
        padding_id: fills the rest of a row.
        word_pieces: captions to the ids of their word pieces, without control tokens.
    """

    def __init__(
        self,
        model_bytes: bytes,
        length: int,
        lowercase: bool = True,
        end_token: bool = True,
        padding_id: int | None = None,
    ):
        self._numbers = _vocabulary(model_bytes)
        control = ("[CLS]", "[SEP]") if end_token else ("[CLS]",)
        needed = ("[UNK]", *control) if padding_id is not None else ("[UNK]", *control, "[PAD]")
        if missing := [token for token in needed if token not in self._numbers]:
            raise UserError(f"has no {missing[0]}; use the vocab.txt that comes with BERT's weights")
        if length <= len(control):
            raise UserError(
                f"{length} tokens are too few for {len(control)} control tokens and a caption; increase length"
            )
        self._first, *self._last = (self._numbers[token] for token in control)
        self.model_bytes, self.length = model_bytes, length
        self.padding_id = self._numbers["[PAD]"] if padding_id is None else padding_id
        if not 0 <= self.padding_id < self.vocabulary_size:
            raise UserError(f"padding id {self.padding_id} is not in the vocabulary; set padding_id to one that is")
        try:
            self.word_pieces = _compile_word_pieces(self._numbers, lowercase)
        except UserError:
            raise
        except Exception as error:  # TensorFlow raises various types for an invalid table
            raise UserError(
                f"is not a vocabulary ({type(error).__name__}); use the vocab.txt that comes with BERT's weights"
            ) from error

    @property
    def vocabulary_size(self) -> int:
        """Number of word pieces, control tokens included."""
        return len(self._numbers)

    def __call__(self, captions: list[str]) -> Int32[np.ndarray, "n length"]:
        """Tokenises captions."""
        ids = np.full((len(captions), self.length), self.padding_id, np.int32)
        capacity = self.length - 1 - len(self._last)
        for row, pieces in enumerate(self.word_pieces([tokenizer_files.truncate(caption) for caption in captions])):
            tokens = [self._first, *pieces[:capacity], *self._last]
            ids[row, : len(tokens)] = tokens
        return ids


def _vocabulary(model_bytes: bytes) -> dict[str, int]:
    """Returns the id of each word piece."""
    try:
        # Not `splitlines`, which also splits at characters such as U+2028 that may be words.
        lines = model_bytes.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            "is not a vocabulary (a text file of word pieces); use the vocab.txt that comes with BERT's weights"
        ) from error
    lines = [line.removesuffix("\r") for line in lines]
    try:
        tokenizer_files.check_vocabulary(lines)
    except Malformed as error:
        raise UserError(f"is not a vocabulary ({error}); use the vocab.txt that comes with BERT's weights") from error
    numbers = {line: number for number, line in enumerate(lines)}
    if len(numbers) < len(lines):
        raise UserError("holds a word piece twice; use the vocab.txt that comes with BERT's weights")
    return numbers


def _compile_word_pieces(numbers: dict[str, int], lowercase: bool) -> Callable[[list[str]], list[list[int]]]:
    """Returns a function from captions to the ids of their word pieces, without control tokens."""
    tf, tf_text = load_tensorflow()
    with tf.device("CPU"):
        words = tf.lookup.KeyValueTensorInitializer(list(numbers), list(numbers.values()), tf.string, tf.int64)
        # The table needs a bucket for unknown words, though the tokenizer has replaced them by [UNK] before.
        table = tf.lookup.StaticVocabularyTable(words, num_oov_buckets=1)
    bert = tf_text.BertTokenizer(table, token_out_type=tf.int32, lower_case=lowercase)

    # Compilation makes a single caption 20 times faster.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
    def tokenize(captions: Any) -> Any:
        with tf.device("CPU"):
            return bert.tokenize(captions).merge_dims(1, 2)

    return lambda captions: tokenize(tf.constant(captions, tf.string, [len(captions)])).to_list()


@functools.cache
def load_tensorflow() -> tuple[Any, Any]:
    """Imports TensorFlow, without accelerators, and TensorFlow Text."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with tokenizer_files.silenced_stderr():
            import tensorflow as tf  # pyright: ignore[reportMissingImports]
            import tensorflow_text as tf_text  # pyright: ignore[reportMissingImports]

            # TensorFlow would allocate all accelerator memory, which JAX needs.
            tf.config.set_visible_devices([], "GPU")
    except ImportError as error:
        raise UserError(f"needs TensorFlow Text ({error}); pip install 'lit-het[tf-text]'") from error
    return tf, tf_text
