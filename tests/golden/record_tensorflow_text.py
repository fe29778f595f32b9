"""Records what TensorFlow Text makes of hard captions: ``python tests/golden/record_tensorflow_text.py``.

The captions are those of ``ids.json``, which is written again. Needs the extra ``tf-text``. A SentencePiece model and a
vocabulary that cover most of the captions are written beside the ids, which have no control tokens.
"""

import json
from pathlib import Path

from lit_het.data_pipelines.texts.tensorflow_text import TensorFlowTextTokenizer, load_tensorflow
from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece

FOLDER = Path(__file__).parent / "tensorflow_text"
# Hard captions, of which BERT's words differ from Hugging Face's from the twelfth on.
CAPTIONS: list[str] = json.loads((FOLDER / "ids.json").read_text())["captions"]
CHARACTERS = [chr(code) for code in range(33, 127)] + list("éßςσœøñ中文日本語アあ한ไνβж—…«»’“”😀👍€£™°²ﬁ")
WORDS = ["the", "cat", "##ing", "sing", "photo", "of", "cafe", "strasse", "naive"]


def main() -> None:
    """Writes the folder."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *CHARACTERS, *(f"##{character}" for character in CHARACTERS), *WORDS]
    vocabulary = "".join(f"{word}\n" for word in words).encode()
    model = train_sentencepiece(CAPTIONS[:8], vocabulary_size=120)
    (FOLDER / "vocab.txt").write_bytes(vocabulary)
    (FOLDER / "pieces.model").write_bytes(model)
    _, tf_text = load_tensorflow()
    lower, cased = (TensorFlowTextTokenizer(vocabulary, 1000, lowercase, False) for lowercase in (True, False))
    ids = {
        "captions": CAPTIONS,
        "sentencepiece": tf_text.SentencepieceTokenizer(model).tokenize(CAPTIONS).to_list(),
        "bert": lower.word_pieces(CAPTIONS),
        "bert_cased": cased.word_pieces(CAPTIONS),
    }
    (FOLDER / "ids.json").write_text(json.dumps(ids) + "\n")


if __name__ == "__main__":
    main()
