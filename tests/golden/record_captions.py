"""Records tokens and figures of the COCO caption evaluation: ``python tests/golden/record_captions.py FOLDER``.

The captions are those of ``captions.json`` and ``captions_of_scripts.json``, which are written again. Needs Java and,
unpacked in FOLDER, the wheel of pycocoevalcap 1.2 (104 MB).
"""

# pyright: reportMissingImports=false

import json
import random
import sys
from pathlib import Path

PATH = Path(__file__).parent / "captions.json"
SCRIPTS = PATH.with_name("captions_of_scripts.json")
# Hard captions, which the file has held since its first recording.
CAPTIONS: list[str] = json.loads(PATH.read_text())["captions"]


def texts(random_: random.Random, words: list[str], count: int, longest: int) -> list[str]:
    """Returns texts of up to ``longest`` words."""
    return [" ".join(random_.choices(words, k=random_.randint(0, longest))) for _ in range(count)]


def random_set(seed: int, images: int, words: int, longest: int) -> tuple[list[str], list[list[str]]]:
    """Returns captions and one to five references for each, of so few words that n-grams repeat."""
    random_ = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(words)]
    references = [texts(random_, vocabulary, random_.randint(1, 5), longest) for _ in range(images)]
    return texts(random_, vocabulary, images, longest), references


def tokens_of(captions: list[str]) -> list[str]:
    """Returns the tokens of captions, by Java."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # Java reads all captions as one text; a letter between two keeps it from looking at the next one's first word.
    apart = {place: [{"caption": text}, {"caption": "x"}] for place, text in enumerate(captions)}
    tokens = [found[0] for found in PTBTokenizer().tokenize(apart).values()]
    assert len(tokens) == len(captions)
    return tokens


def kinds_of_characters() -> dict[str, list[tuple[int, int]]]:
    """Returns ranges of the characters up to U+FFFF that are like letters, marks, signs or spaces, by their tokens."""
    codes = [
        code for code in range(0x80, 0x10000) if not 0xD800 <= code < 0xE000 and len(f"a{chr(code)}a".split()) == 1
    ]
    kinds: dict[str, list[tuple[int, int]]] = {kind: [] for kind in ("x{}y 9{}", "x{}y 9 {}", "x {} y 9 {}", "x y 9")}
    for code, tokens in zip(codes, tokens_of([f"x{chr(code)}y 9{chr(code)}" for code in codes]), strict=True):
        ranges = kinds.get(tokens.replace(chr(code).lower(), "{}"))
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = ranges[-1][0], code
        elif ranges is not None:
            ranges.append((code, code))
    return kinds


def sets(tokens: list[str]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Returns captions and references by name; of five recorded captions, four are the references of the first."""
    blocks = [tokens[start : start + 5] for start in range(0, len(tokens) - 4, 5)]
    cat, dog = "a cat sits on a mat", "a dog runs in the park"
    return {
        "captions": ([block[0] for block in blocks], [block[1:] for block in blocks]),
        "random": random_set(0, images=40, words=12, longest=12),
        "two words": random_set(1, images=15, words=2, longest=8),
        "many words": random_set(2, images=10, words=200, longest=15),
        "one image": ([cat], [[cat, dog]]),
        "shorter than four words": (["a cat", "a", "dog"], [[cat], [dog, cat], ["dog", dog]]),
        "empty caption": (["", dog], [[cat], [dog]]),
        "all captions empty": (["", ""], [[cat], [dog]]),
        "empty reference": ([cat, "", dog], [["", cat], [""], [dog]]),
        "equal references": ([cat, dog], [[cat] * 5, [cat, cat, dog]]),
        "nothing in common": (["x y z u v", "p q r s t"], [[cat], [dog]]),
        "longer and shorter": ([cat + " and sleeps there", "a dog"], [[cat, "a cat"], [dog, "a dog runs"]]),
    }


def main(folder: str) -> None:
    """Writes the file."""
    sys.path.insert(0, folder)
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    texts_of_scripts = list(json.loads(SCRIPTS.read_text())["captions"])
    recorded_scripts = {
        "captions": dict(zip(texts_of_scripts, tokens_of(texts_of_scripts), strict=True)),
        "characters": kinds_of_characters(),
    }
    SCRIPTS.write_text(json.dumps(recorded_scripts, ensure_ascii=False) + "\n")
    tokens = tokens_of(CAPTIONS)
    recorded = {}
    for name, (hypotheses, references) in sets(tokens).items():
        expected, given = dict(enumerate(references)), {place: [text] for place, text in enumerate(hypotheses)}
        recorded[name] = {
            "hypotheses": hypotheses,
            "references": references,
            "bleu": Bleu(4).compute_score(expected, given, verbose=0)[0],
            "cider": Cider().compute_score(expected, given)[1].tolist(),
            "mean_cider": float(Cider().compute_score(expected, given)[0]),
            "rouge_l": Rouge().compute_score(expected, given)[1].tolist(),
            "mean_rouge_l": float(Rouge().compute_score(expected, given)[0]),
        }
    PATH.write_text(json.dumps({"captions": CAPTIONS, "tokens": tokens, "sets": recorded}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
