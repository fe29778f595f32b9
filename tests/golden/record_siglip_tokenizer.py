"""Records the ids of transformers' `SiglipTokenizer` on hard texts: ``python tests/golden/record_siglip_tokenizer.py``.

The texts are those of ``ids.json``, which is written again. Needs the extra ``parity``. The folder is as
`transformers` saves it, with a SentencePiece model that covers most texts.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece

FOLDER = Path(__file__).parent / "hf_siglip_tokenizer"
LENGTH = 12
TRAINING = [f"A photo, of the {animal}!" for animal in ("cat", "dog", "owl", "newt", "heron", "mule")]
TRAINING += ["it's the cat's \"best\" day", "naïve café, über-cool", "the cat — a … photo"]
# Punctuation of ASCII, texts of which nothing is left, Unicode's, white space of all kinds, SentencePiece's own mark.
TEXTS: list[str] = [text for text, _ in json.loads((FOLDER / "ids.json").read_text())]


def save(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer of transformers and the ids that it gives the texts."""
    tokenizer.save_pretrained(folder)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True)["input_ids"]
    rows = ",\n".join(json.dumps([text, row]) for text, row in zip(TEXTS, ids, strict=True))
    (folder / "ids.json").write_text(f"[\n{rows}\n]\n")


def main() -> None:
    """Writes the folder."""
    transformers = importlib.import_module("transformers")  # of an extra
    (FOLDER / "spiece.model").write_bytes(train_sentencepiece(TRAINING, vocabulary_size=60))
    save(transformers.SiglipTokenizer(str(FOLDER / "spiece.model"), model_max_length=LENGTH), FOLDER)


if __name__ == "__main__":
    main()
