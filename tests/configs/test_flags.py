"""Flags of configurations: alternatives by name, fields that are None, arguments of files, and what is not a flag."""

from pathlib import Path

import pytest

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.parsing import parse_config
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.optimizers import SGD

LIT, CLASSIFIER = "quickstart_lit_het_xl", "glyph_classifier"


def parsed(name, *flags) -> ExperimentConfig:
    return parse_config(Path(f"configs/{name}.py"), flags)


def refusal(name, *flags) -> str:
    with pytest.raises(UserError) as error:
        parsed(name, *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_flag_gives_a_field_a_value_that_is_none_in_the_file():
    assert parsed(CLASSIFIER).pretrained is None
    assert parsed(CLASSIFIER, "--pretrained.run", "runs/mine").pretrained == PretrainedConfig(Path("runs/mine"))
    assert parsed(LIT, "--pretrained", "None").pretrained is None


def test_the_rest_of_such_a_field_is_required_by_name():
    assert "--pretrained.run PATH" in refusal(CLASSIFIER, "--pretrained.pattern", "head/.*")


@pytest.mark.parametrize("flags", [("--task.head", "het_xl"), ("--task.head=HetXL",), ("--task.head", "het-xl")])
def test_a_head_is_chosen_by_name_and_keeps_equal_fields(flags):
    before = parsed("quickstart_lit_deterministic", "--task.head.initial-bias", "-3").task.head
    assert isinstance(before, DeterministicContrastiveConfig)
    head = parsed("quickstart_lit_deterministic", "--task.head.initial-bias", "-3", *flags).task.head
    assert head == HetXLContrastiveConfig(temperature=before.temperature, initial_bias=-3.0)


def test_flags_of_the_chosen_class_are_those_of_its_fields_at_any_depth():
    head = parsed(CLASSIFIER, "--task.head.covariance.num-factors", "7", "--task.head", "het_h").task.head
    assert isinstance(head, HetHConfig)
    assert head.covariance.num_factors == 7
    rule = parsed(LIT, "--optimizer.rule", "sgd", "--optimizer.rule.momentum", "0.5").optimizer.rule
    assert rule == SGD(momentum=0.5)
    flags = ("--task.image_tower.encoder.experts.num-experts", "4", "--task.image-tower.encoder.depth", "4")
    tower = parsed(CLASSIFIER, *flags).task.image_tower
    assert isinstance(tower, ViTConfig)
    assert tower.encoder.experts == ExpertsConfig(num_experts=4)
    tower = parsed(CLASSIFIER, "--task.image-tower", "resnet", "--task.image-tower.image-size", "32").task.image_tower
    assert isinstance(tower, ResNetConfig)


def test_several_classes_must_be_chosen_from():
    assert parsed(LIT, "--data.crop.min-area", "0.5", "--data.crop", "inception").data.crop == InceptionCrop(0.5)
    line = refusal(LIT, "--data.crop.min-area", "0.5")
    assert line == "--data.crop.min-area needs --data.crop inception|random as well, because it is None"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--task.head", "het_x"), "--task.head het_x is not one of deterministic, het_xl"),
        (("--task.head",), "--task.head without a value is not one of deterministic, het_xl"),
        (
            ("--pretrained", "runs/x"),
            "is not one of pretrained, None; its fields are flags too, such as --pretrained.run",
        ),
        (("--task.head.num-samples", "0", "--task.head", "het_xl"), "num_samples = 0"),
        (("--evaluations", "x"), "--evaluations is not a flag; set it in the configuration file"),
        (("--evaluations=x",), "--evaluations is not a flag; set it in the configuration file"),
        (("--optimizer.groups", "x"), "--optimizer.groups is not a flag"),
        (("--cadence.log_step", "3"), "unknown flag --cadence.log_step; did you mean --cadence.log-steps?"),
        (("--lenght=3",), "unknown flag --lenght=3; did you mean --length?"),
    ],
)
def test_what_is_no_flag_or_name_is_one_line_that_never_suggests_itself(flags, expected):
    assert expected in refusal(LIT, *flags)


def test_help_lists_the_names_of_classes(capsys):
    with pytest.raises(SystemExit):
        parsed(LIT, "--help")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--task.head deterministic|het_xl" in said
    assert "--data.crop inception|random|None" in said


@pytest.fixture
def file(tmp_path):
    """A configuration whose run directory tells the arguments."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\n"
        "from pathlib import Path\n"
        "from typing import Literal\n"
        "from lit_het.configs import glyph_classifier\n\n"
        "Head = Literal['a', 3]\n\n\n"
        "def get_config(members: int, rate: float = 0.1, wide: bool = False, name: str = 'x', head: Head = 'a'):\n"
        "    run_dir = Path(repr((members, rate, wide, name, head)))\n"
        "    return dataclasses.replace(glyph_classifier.get_config(), run_dir=run_dir)\n"
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("members=2", "(2, 0.1, False, 'x', 'a')"),
        ("members=-3,rate=1e-4,wide=true,name=b=c,head=3", "(-3, 0.0001, True, 'b=c', 3)"),
        ("wide=False,name=,members=0", "(0, 0.1, False, '', 'a')"),
    ],
)
def test_arguments_of_a_file_are_read_by_their_annotations(file, arguments, expected):
    assert str(experiment.load_module_config(Path(f"{file}:{arguments}")).run_dir) == expected


@pytest.mark.parametrize(
    "wrong", ["members=two", "members=2.5", "rate=fast", "wide=1", "head=b", "size=3", "name", "="]
)
def test_arguments_that_a_file_does_not_take_are_one_line_with_what_it_takes(file, wrong):
    with pytest.raises(UserError) as error:
        experiment.load_module_config(Path(f"{file}:members=1,{wrong}"))
    assert str(error.value) == (
        f"{file} does not accept {wrong!r}; it accepts members=whole number, rate=number, wide=true|false, name=text, "
        "head=a|3"
    )


@pytest.mark.parametrize("given", ["", ":rate=0.5"])
def test_an_argument_that_a_file_needs_is_named(file, given):
    with pytest.raises(UserError, match=r"mine.py needs the argument members; add :members=whole number to its path"):
        experiment.load_module_config(Path(f"{file}{given}"))
