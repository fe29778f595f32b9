"""Any tokenizer of `transformers`, for the kinds that the faster readers beside this module do not know.

A run keeps its files in one, ``{"vocab.txt": "base64 ..."}``. Nothing of a repository is run.
"""

import base64
import functools
import json
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from lit_het import untrusted
from lit_het.console import message
from lit_het.data_pipelines.texts import tokenizer_files
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

FILES = (
    *("tokenizer_config.json", "config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "dict.txt", "bpe.codes", "vocab.bpe", "normalizer.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
"""The names of the files that tokenizers of transformers are made of; others are not read."""

_MAX_PACKED_BYTES = tokenizer_files.MAX_FILE_BYTES // 3 * 4 + 2**16


def read(model: Path) -> bytes:
    """Returns the files of a tokenizer's folder in one, or that one, which a run keeps."""
    try:
        if not model.is_dir():
            return untrusted.read_bytes(model, _MAX_PACKED_BYTES + 1)
        limit = tokenizer_files.MAX_FILE_BYTES
        found = {name: untrusted.read_bytes(model / name, limit + 1) for name in FILES if (model / name).is_file()}
    except OSError as error:
        raise UserError(f"{model}: cannot be read ({error.strerror}); check the tokenizer's path") from error
    if not found:
        raise UserError(f"{model}: holds no tokenizer of transformers; give the folder that save_pretrained wrote")
    if sum(map(len, found.values())) > limit:
        raise UserError(f"{model}: its tokenizer has more than {limit:,} bytes; check the tokenizer's path")
    return json.dumps({name: base64.b64encode(content).decode() for name, content in found.items()}).encode()


class TransformersTokenizer:
    """Turns captions into token ids as `transformers` does; safe to share between threads.

    Attributes:
        model_bytes: the tokenizer's files, see `read`.
        length: tokens per caption, control tokens included, which truncation keeps.
        padding_id: fills the rest of a row.
    """

    def __init__(self, model_bytes: bytes, length: int, padding_id: int | None = None):
        _say_once()
        self._tokenizer = _opened(model_bytes)
        control = self._tokenizer.num_special_tokens_to_add(pair=False)
        if length <= control:
            raise UserError(f"{length} tokens are too few for {control} control tokens and a caption; increase length")
        padding = self._tokenizer.pad_token_id if padding_id is None else padding_id
        if padding is None:
            raise UserError("has no padding token; set padding_id")
        if not 0 <= padding < self.vocabulary_size:
            raise UserError(f"padding id {padding} is not in the vocabulary; set padding_id to one that is")
        self.model_bytes, self.length, self.padding_id = model_bytes, length, padding
        self._lock = threading.Lock()  # the library sets truncation anew in each call
        self(["A photo of 2 cats."])

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of the ids, exclusive, control tokens included."""
        return len(self._tokenizer)

    def __call__(self, captions: list[str]) -> Int32[np.ndarray, "n length"]:
        """Tokenises captions."""
        texts = [tokenizer_files.truncate(caption) for caption in captions]
        if not texts:
            return np.zeros((0, self.length), np.int32)
        try:
            with self._lock:
                rows = self._tokenizer(texts, truncation=True, max_length=self.length, padding=False)["input_ids"]
        except Exception as error:  # each tokenizer raises its own
            raise UserError(f"transformers' tokenizer fails ({_reason(error)}); use another tokenizer") from error
        ids = np.full((len(texts), self.length), self.padding_id, np.int32)
        for row, found in zip(ids, rows, strict=True):
            if len(found) > self.length or not all(0 <= number < self.vocabulary_size for number in found):
                raise UserError(f"transformers' tokenizer does not make {self.length} ids of its vocabulary")
            row[: len(found)] = found
        return ids


def _opened(model_bytes: bytes) -> Any:
    """Returns the tokenizer of transformers in files that are packed in one."""
    try:
        files = untrusted.parse_json(model_bytes, _MAX_PACKED_BYTES)
        if not isinstance(files, dict) or not files or not all(name in FILES for name in files):
            raise Malformed("not the files of a tokenizer")
        contents = {name: base64.b64decode(text, validate=True) for name, text in files.items()}
    except (Malformed, ValueError, TypeError) as error:
        raise UserError(f"is no tokenizer that lit-het stored ({error}); copy it again") from error
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="lit-het-tokenizer-") as folder:
        for name, content in contents.items():
            (Path(folder) / name).write_bytes(content)
        try:
            with tokenizer_files.silenced_stderr():
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except BaseException as error:  # also panics of its Rust code
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = _reason(error).replace(folder, "the folder")
            raise UserError(f"transformers cannot read this tokenizer ({reason}); use another one") from error


def _reason(error: BaseException) -> str:
    first = " ".join(str(error).split()).partition(". ")[0]
    return re.sub(r"\s*You can inspect the repository.*", "", first)[:200] or type(error).__name__


@functools.cache
def _say_once() -> None:
    message("captions are read by a tokenizer of transformers, which is slower than tokenizer.json or SentencePiece")
