from pathlib import Path

import pytest

from lit_het.errors import UserError
from lit_het.eval.prompts import check_templates, fill_template, read_classnames, read_templates


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


def test_no_templates_is_an_error():
    with pytest.raises(UserError, match="no prompt template"):
        check_templates([])
