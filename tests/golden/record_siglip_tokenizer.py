"""Records the ids of transformers' `SiglipTokenizer` on hard texts: ``python tests/golden/record_siglip_tokenizer.py``.

Needs the extra ``parity``. The folder is as `transformers` saves it, with a SentencePiece model that covers most texts.
"""

import importlib
import json
from pathlib import Path

from lit_het.data_pipelines.tokenizers import train_sentencepiece

FOLDER = Path(__file__).parent / "hf_siglip_tokenizer"
LENGTH = 12
TRAINING = [f"A photo, of the {animal}!" for animal in ("cat", "dog", "owl", "newt", "heron", "mule")]
TRAINING += ["it's the cat's \"best\" day", "naïve café, über-cool", "the cat — a … photo"]
TEXTS = [
    "a photo of a cat.",
    "A  photo,\tof\n the CAT!!",
    "it's the cat's \"best\" day",
    "“curly” quotes — a dash … dots",
    "the - cat",
    "a_b #hash 100% [x] {c} <y> `z` ^ ~ | \\d @",
    "a.b.c",
    "owl " * 20,
    # Nothing is left of these.
    "",
    "   ",
    "...",
    " . , !? ",
    # Unicode: other punctuation stays, also where the model's own table makes ASCII of it.
    "naïve CAFÉ",
    "ＣＡＴ．",
    "! ﹗ cat ！",
    "ﬁ ½ ™ unseen ✓ 猫",
    # White space of all kinds, and SentencePiece's own mark.
    "a\u00a0cat\u3000dog\u2028owl",
    "a\x1fcat\x1c dog\x85owl\x0bnewt",
    "zero\u200bwidth\ufeff",
    "▁a cat▁dog . ▁ owl!▁!",
]


def main() -> None:
    """Writes the folder."""
    transformers = importlib.import_module("transformers")  # of an extra
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "spiece.model").write_bytes(train_sentencepiece(TRAINING, vocabulary_size=60))
    tokenizer = transformers.SiglipTokenizer(str(FOLDER / "spiece.model"), model_max_length=LENGTH)
    tokenizer.save_pretrained(FOLDER)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True)["input_ids"]
    rows = ",\n".join(json.dumps([text, row]) for text, row in zip(TEXTS, ids, strict=True))
    (FOLDER / "ids.json").write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
