"""A SigLIP 2 run: the sigmoid loss, captions, self-distillation and masked prediction from a given step on."""

import pytest

import lit_het
from lit_het.configs import quickstart_lit_deterministic
from lit_het.configs.experiment import PretrainedConfig
from lit_het.errors import UserError
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives.distillation import DistillationConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import assert_resumes_to_the_same_parameters, changed, run_command

pytestmark = pytest.mark.slow  # the losses and the task have tests of their own
STEPS, BEGIN = 6, 3


def siglip2(data, run_dir, towers):
    config = tiny.shrink(quickstart_lit_deterministic.get_config(), data, run_dir)
    size = config.task.require_image_tower().image_size
    distillation = DistillationConfig(
        Duration(50, "percent"), num_views=2, view_size=size // 2, hidden=16, bottleneck=8, num_prototypes=20
    )
    return changed(
        config,
        task__head__initial_bias=-10.0,
        task__loss=SigmoidLoss(),
        task__locked=("text_tower/.*",),
        task__distillation=distillation,
        pretrained=PretrainedConfig(run=towers, pattern="(image|text)_tower/.*"),
        length=Duration(STEPS),
        average_decay=0.9,
        cadence=Cadence(log_steps=1, save_steps=2, evaluate_steps=STEPS),
        evaluations=(),
        calibration=None,
    )


@pytest.fixture(scope="module")
def config(data, trained_lit, tmp_path_factory):
    """A trained run; tests only read it."""
    config = siglip2(data, tmp_path_factory.mktemp("siglip2") / "run", trained_lit.run_dir)
    train(config)
    return config


def test_the_losses_begin_at_half_of_the_run(config):
    records = read_metrics(config.run_dir / "metrics.jsonl")
    found = {record["step"]: record for record in records if "train/loss" in record}
    assert set(found) == set(range(1, STEPS + 1))
    for step, record in found.items():
        has_begun = step > BEGIN  # a record is that of the steps before it
        assert (record["train/distillation_loss"] > 0) == has_begun, step
        assert (record["train/masked_prediction_loss"] > 0) == has_begun, step


def test_a_run_that_was_stopped_goes_on_to_the_same_parameters(config, tmp_path):
    # The step that was saved before the last one has these losses.
    assert_resumes_to_the_same_parameters(config, tmp_path)


def test_it_is_opened_and_exported_as_any_image_text_model(config, tmp_path, capsys):
    model = lit_het.load(config.run_dir)
    assert "image-text model" in repr(model)
    model.save_pretrained(tmp_path / "folder")
    assert "image-text model" in repr(lit_het.load(tmp_path / "folder"))
    for to, name in (("npz", "model.npz"), ("huggingface", "hf")):
        run_command("export", "--checkpoint", config.run_dir, "--to", to, "--output", tmp_path / name)
        assert f"--to {to} leaves out distillation; --to lit-het exports all" in capsys.readouterr().err


def test_a_run_needs_an_average_as_teacher_and_heads_that_are_trained(config):
    with pytest.raises(UserError, match="set average_decay"):
        changed(config, average_decay=None)
    with pytest.raises(UserError, match=r"its own heads: leave both out of task\.locked"):
        changed(config.task, locked=("distillation/.*",)).build()


def test_a_run_that_ends_before_its_losses_begin_is_refused(config, tmp_path):
    with tiny.untrained(), pytest.raises(UserError, match=f"start {STEPS} steps is step {STEPS} of a run of {STEPS}"):
        train(changed(config, run_dir=tmp_path / "run", task__distillation__start=Duration(STEPS)))
