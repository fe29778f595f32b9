"""CIDEr, BLEU, ROUGE-L and the tokenizer: against equations, hand arithmetic and recorded figures of pycocoevalcap."""

import itertools
import json
import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_het.eval.metrics.captions import bleu, cider, cider_d, rouge_l, tokenize
from tests.refusals import assert_refused

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = json.loads((GOLDEN / "captions.json").read_text())
SCRIPTS = json.loads((GOLDEN / "captions_of_scripts.json").read_text())
SETS = RECORDED["sets"]
FIGURES = [cider, cider_d, bleu, rouge_l]

texts = st.lists(st.sampled_from("abcde"), max_size=8).map(" ".join)
images = st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=5)


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def subsequences(words: list[str]) -> set[tuple[str, ...]]:
    return {part for size in range(len(words) + 1) for part in itertools.combinations(words, size)}


def cider_by_equations(hypotheses, references, cut: bool) -> list[float]:
    """CIDEr, or with ``cut`` CIDEr-D times 1/10, with vectors over all n-grams."""
    scores = np.zeros(len(hypotheses))
    for n in range(1, 5):
        grams = sorted({gram for text in itertools.chain(hypotheses, *references) for gram in ngrams(text, n)})
        holding = np.array([sum(any(gram in ngrams(text, n) for text in own) for own in references) for gram in grams])
        idf = np.log(len(references) / np.maximum(holding, 1)) if grams else np.zeros(0)

        def weights(text, n=n, grams=grams, idf=idf):
            counts = np.array([ngrams(text, n).count(gram) for gram in grams], np.float64)
            return (counts if cut else counts / max(counts.sum(), 1)) * idf

        for image, (hypothesis, own) in enumerate(zip(hypotheses, references, strict=True)):
            for text in own:
                g, r = weights(hypothesis), weights(text)
                norms = np.linalg.norm(g) * np.linalg.norm(r)
                cosine = (np.minimum(g, r) if cut else g) @ r / norms if norms else 0.0
                difference = len(ngrams(hypothesis, 2)) - len(ngrams(text, 2))
                penalty = np.exp(-(difference**2) / 72) if cut else 1.0
                scores[image] += cosine * penalty / len(own) / 4
    return scores.tolist()


def bleu_by_equations(hypotheses, references) -> list[float]:
    """BLEU-1 to 4 as the paper has them."""
    found, logs = [], 0.0
    lengths = [len(text.split()) for text in hypotheses]
    closest = [
        min(sorted(len(text.split()) for text in own), key=lambda size, length=length: abs(size - length))
        for length, own in zip(lengths, references, strict=True)
    ]
    penalty = min(1.0, math.exp(1 - sum(closest) / sum(lengths)))
    for n in range(1, 5):
        matched = total = 0
        for hypothesis, own in zip(hypotheses, references, strict=True):
            for gram in set(ngrams(hypothesis, n)):
                count = ngrams(hypothesis, n).count(gram)
                matched += min(count, max(ngrams(text, n).count(gram) for text in own))
                total += count
        logs += math.log(matched / total)
        found.append(penalty * math.exp(logs / n))
    return found


def rouge_by_equations(hypothesis: str, own: list[str]) -> float:
    """ROUGE-L from all subsequences of both texts."""
    parts = subsequences(hypothesis.split())
    common = [max(map(len, parts & subsequences(text.split()))) for text in own]
    precision = max(count / len(hypothesis.split()) for count in common)
    recall = max(count / len(text.split()) for count, text in zip(common, own, strict=True))
    return 2.44 * precision * recall / (recall + 1.44 * precision) if precision else 0.0


def random_set(seed: int, count: int = 6, words: int = 6, shortest: int = 1):
    random = np.random.default_rng(seed)

    def text():
        return " ".join(random.choice(list("abcdefgh")[:words], size=random.integers(shortest, 8)))

    return [text() for _ in range(count)], [[text() for _ in range(random.integers(1, 4))] for _ in range(count)]


@pytest.mark.parametrize("name", SETS)
def test_figures_are_those_of_the_coco_evaluation(name):
    recorded = SETS[name]
    given_set = recorded["hypotheses"], recorded["references"]
    np.testing.assert_allclose(cider_d(*given_set), recorded["cider"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rouge_l(*given_set), recorded["rouge_l"], rtol=1e-12)
    np.testing.assert_allclose(bleu(*given_set), recorded["bleu"], rtol=1e-9)
    assert cider_d(*given_set).mean() == pytest.approx(recorded["mean_cider"], rel=1e-9, abs=1e-12)
    assert rouge_l(*given_set).mean() == pytest.approx(recorded["mean_rouge_l"], rel=1e-12)


def test_tokens_are_those_of_java():
    expected = dict(zip(RECORDED["captions"], RECORDED["tokens"], strict=True))
    assert {caption: tokenize(caption) for caption in expected} == expected


@pytest.mark.parametrize("caption", SCRIPTS["captions"])
def test_captions_of_many_languages_have_the_tokens_of_java(caption):
    assert tokenize(caption) == SCRIPTS["captions"][caption]


@pytest.mark.parametrize("kind", SCRIPTS["characters"])
def test_marks_letters_and_signs_are_those_of_java(kind):
    for first, last in SCRIPTS["characters"][kind]:
        marks = {code for code in range(first, last + 1) if unicodedata.category(chr(code)).startswith("M")}
        for code in {first, last} | marks:
            assert tokenize(f"x{chr(code)}y 9{chr(code)}") == kind.format(*[chr(code).lower()] * 2), hex(code)


def test_known_differences_to_java_are_all_that_the_documentation_names():
    # Of each text Java's tokens, which are not recorded, and ours.
    different = {
        "Inc.a": ("inc. a", "inc.a"),
        "(^_^)": ("-lrb-^_^-rrb-", "-lrb- ^_^ -rrb-"),
        "caf&eacute;": ("caf&eacute;", "caf & eacute"),
        "don`t": ("do n`t", "don t"),
        "««": ("````", ""),
    }
    for text, (of_java, ours) in different.items():
        assert tokenize(text) == ours != of_java


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("A man's dog can't swim.", "a man 's dog ca n't swim"),
        ("He cannot, won't, and isn’t gonna!", "he can not wo n't and is n't gon na"),
        ('A "stop" sign; it reads: (stop)', "a stop sign it reads -lrb- stop -rrb-"),
        ("Mr. Smith sits at 5 p.m. in the U.S.", "mr. smith sits at 5 p.m. in the u.s."),
        ("1,000 cars -- 3.5 km... $5", "1,000 cars 3.5 km $ 5"),
        ("1 1/2 cups", "1\u00a01/2 cups"),
        ("two\nlines", "two lines"),
        ("", ""),
        ("...!", ""),
    ],
)
def test_captions_are_split_as_one_expects(caption, tokens):
    assert tokenize(caption) == tokens


@settings(deadline=None)
@given(st.text(max_size=40))
@example("+\xad\xad")
def test_any_text_has_tokens_in_lower_case_and_without_punctuation(caption):
    found = tokenize(caption)
    assert found == found.lower()
    tokens = found.split(" ") if found else []
    assert "" not in tokens
    assert not {".", ",", "!", "?", ":", ";", "'", '"', "`", "-", "--", "..."} & set(tokens)
    assert tokenize(f"  {caption} ") == found


@pytest.mark.parametrize("seed", range(8))
def test_figures_agree_with_their_equations(seed):
    hypotheses, references = random_set(seed, words=3 + seed % 6)
    np.testing.assert_allclose(cider(hypotheses, references), cider_by_equations(hypotheses, references, cut=False))
    expected = 10 * np.array(cider_by_equations(hypotheses, references, cut=True))
    np.testing.assert_allclose(cider_d(hypotheses, references), expected)
    hypotheses, references = random_set(seed, count=10)
    expected = [rouge_by_equations(*pair) for pair in zip(hypotheses, references, strict=True)]
    np.testing.assert_allclose(rouge_l(hypotheses, references), expected)
    hypotheses, references = random_set(seed, count=30, words=3, shortest=4)
    np.testing.assert_allclose(bleu(hypotheses, references), bleu_by_equations(hypotheses, references), rtol=1e-8)


def test_cider_by_hand():
    # Words and pairs of words are equal, and longer n-grams do not exist: 2 of 4 lengths have the cosine 1.
    same = ["a b", "c d"], [["a b"], ["c d"]]
    np.testing.assert_allclose(cider(*same), [0.5, 0.5])
    np.testing.assert_allclose(cider_d(*same), [5.0, 5.0])
    # With equal idf, words (2, 0) and (1, 1) have the cosine 1/√2; where 2 is cut to 1, 1/(2√2). Pairs have none.
    repeated = ["a a", "c d"], [["a b"], ["c d"]]
    np.testing.assert_allclose(cider(*repeated)[0], 1 / math.sqrt(2) / 4)
    np.testing.assert_allclose(cider_d(*repeated)[0], 10 / (2 * math.sqrt(2)) / 4)
    # Three pairs of words more than the reference: exp(-9 / 72) for words (1, 1, 1, 1, 1) and (1, 1); for pairs 1 of 4.
    longer = ["a b x y z", "c d"], [["a b"], ["c d"]]
    np.testing.assert_allclose(cider_d(*longer)[0], 10 * (2 / math.sqrt(10) + 1 / 2) / 4 * math.exp(-9 / 72))
    # Words in references of all images, or of the only one, count nothing.
    np.testing.assert_allclose(cider_d(["a", "a"], [["a b"], ["a c"]]), 0)
    np.testing.assert_allclose(cider(["a b c d"], [["a b c d"]]), 0)


def test_bleu_by_hand():
    # One of three "the" counts, and no pair; the reference is shorter.
    found = bleu(["the the the"], [["the cat"]])
    np.testing.assert_allclose(found[0], 1 / 3, rtol=1e-8)
    np.testing.assert_allclose(found[1:], 0, atol=1e-4)
    # All n-grams match, and of references with 4 and 8 words the shorter is as close: no penalty for brevity.
    np.testing.assert_allclose(bleu(["a b c d e f"], [["a b c d e f g h", "a b c d"]]), 1, rtol=1e-8)
    # A reference with 7 words is closest: exp(1 - 7/6).
    found = bleu(["a b c d e f"], [["a b c d e f g", "a b c d"]])
    np.testing.assert_allclose(found, math.exp(1 - 7 / 6), rtol=1e-8)
    # It is of all captions together and no mean over images: of 1 + 9 words, 1 + 0 match.
    found = bleu(["a", "x x x x x x x x x"], [["a"], ["b c d e f g h i j"]])
    np.testing.assert_allclose(found[0], 0.1, rtol=1e-8)


def test_rouge_l_by_hand():
    # "a c d" is common: P = 3/4 and R = 3/5.
    expected = (1 + 1.2**2) * 0.75 * 0.6 / (0.6 + 1.2**2 * 0.75)
    np.testing.assert_allclose(rouge_l(["a b c d"], [["a c d e f"]]), expected)
    # The largest R, 1, and the largest P, 3/4, come from different references.
    expected = (1 + 1.2**2) * 0.75 / (1 + 1.2**2 * 0.75)
    np.testing.assert_allclose(rouge_l(["a b c d"], [["a c d e f", "a b"]]), expected)
    np.testing.assert_allclose(rouge_l(["a b", "c"], [["c"], ["c"]], beta=3.0), [0, 1])


@settings(deadline=None)
@given(images, st.randoms())
def test_the_order_of_images_and_of_references_does_not_matter(pairs, random):
    places = random.sample(range(len(pairs)), len(pairs))
    shuffled = [(pairs[place][0], random.sample(pairs[place][1], len(pairs[place][1]))) for place in places]
    for figure in FIGURES:
        one, other = (figure(*map(list, zip(*own, strict=True))) for own in (pairs, shuffled))
        np.testing.assert_allclose(other, one if figure is bleu else one[places], rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(images)
def test_no_caption_is_better_than_a_single_reference_itself(pairs):
    hypotheses, references = [text for text, _ in pairs], [own[:1] for _, own in pairs]
    best = [own[0] for own in references]
    for figure, most in ((cider, 1), (cider_d, 10), (rouge_l, 1)):
        highest = figure(best, references)
        assert (figure(hypotheses, references) <= highest + 1e-9).all()
        assert (highest <= most + 1e-9).all()
    np.testing.assert_allclose(rouge_l(best, references), 1)


def test_captions_equal_to_a_rare_reference_have_the_highest_scores_of_each_image_but_for_bleu():
    given_set = ["a b c d e", "f g h i"], [["a b c d e"], ["f g h i"]]
    for figure, most, shape in ((cider, 1, 2), (cider_d, 10, 2), (bleu, 1, 4), (rouge_l, 1, 2)):
        np.testing.assert_allclose(figure(*given_set), np.full(shape, most), rtol=1e-8)


@pytest.mark.parametrize("figure", FIGURES)
def test_what_cannot_be_scored_is_named(figure):
    assert_refused("no captions to score; give at least one", figure, [], [])
    assert_refused("2 captions and references of 1 images; give a list", figure, ["a", "b"], [["a"]])
    assert_refused("image 1 has no reference; give one, or leave the image out", figure, ["a", "b"], [["a"], []])
    assert_refused("references of image 0 are a single text; put it into a list", figure, ["a"], ["a"])
