"""``--experts`` of evaluations: a trained V-MoE whose experts are used in another way than in training."""

import json
import re

import jax
import numpy as np
import pytest

from lit_het.configs import quickstart_lit_het_xl
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.errors import UserError
from lit_het.eval.evaluation import read_records
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.models.experts import with_experts
from lit_het.models.opening import open_run
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command
from tests.cli.test_benchmark import write_set


@pytest.fixture(scope="module")
def vmoe(data, tmp_path_factory):
    """A finished classifier of the names whose experts are random numbers; tests only read it."""
    config = vmoe_config(data, tmp_path_factory.mktemp("vmoe") / "run")
    tiny.finish_untrained(config)
    return config.run_dir


def vmoe_config(data, run_dir, **fields):
    """Returns the configuration of a classifier on a V-MoE with other fields of its experts."""
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, run_dir)
    # Without a limit of the experts, so that predictions do not depend on the batch.
    experts = ExpertsConfig(4, 2, blocks=(0,), dispatch="ragged", dropout_rate=0.5, **fields)
    num_classes = len(tiny.COLOURS) * len(tiny.SHAPES)
    task = changed(config.task, image_tower__encoder__experts=experts, head__zero_kernel=False, num_classes=num_classes)
    return changed(config, task=task, data__labels=ClassIndex())


@pytest.mark.slow
def test_samples_of_dropout_are_an_ensemble_of_a_model_that_has_one_prediction(vmoe, data, tmp_path):
    output, flags = tmp_path / "figures.json", ("--data", f"shapes={data / 'train'}", "--split", ".")
    run_command("ensemble", "--checkpoint", vmoe, *flags, "--output", output, "--experts", "dropout_samples=3")
    figures = json.loads(output.read_text())
    assert figures["ensemble/shapes/disagreement"] > 0
    assert "ensemble/shapes/member_3/nll" in figures
    assert not list(read_records(vmoe)), "another model than that of the run"


@pytest.mark.slow
def test_other_experts_give_other_probabilities_and_those_of_training_the_same(vmoe):
    run = open_run(vmoe)
    images = np.random.default_rng(0).integers(0, 256, (3, *[run.config.data.image_size] * 2, 3), np.uint8)

    def features(*fields):
        return np.asarray(jax.jit(with_experts(run, fields).task.features)(run.params, images))

    assert with_experts(run, ()) is run
    of_training = features()
    np.testing.assert_array_equal(features("num_selected=2"), of_training)
    assert np.abs(features("num_selected=1") - of_training).max() > 1e-3
    assert features("num_members=2").shape == (3, 2 * of_training.shape[1])


def test_a_field_that_is_true_or_false_is_given_by_these_words(vmoe, data, tmp_path):
    output, flags = tmp_path / "figures.json", ("--data", f"shapes={data / 'train'}", "--split", ".")
    fewer = ["batch_priority=True", "eval_capacity_factor=0.5", "dispatch=einsum"]
    run_command("zero-shot", "--checkpoint", vmoe, *flags, "--output", output, "--experts", *fewer)
    assert "supervised/shapes/nll" in json.loads(output.read_text())
    run = with_experts(open_run(vmoe), fewer)
    assert isinstance(tower := run.config.task.image_tower, ViTConfig)
    assert tower.encoder.experts is not None
    assert tower.encoder.experts.batch_priority


@pytest.mark.slow
def test_a_benchmark_of_other_experts_has_its_own_page_and_saves_nothing_in_the_run(vmoe, tmp_path, capsys):
    write_set(tmp_path, "wds_cifar10")
    command = ["benchmark", vmoe, "--suite", "clip_benchmark", "--data", tmp_path]
    assert "name its page with --output" in refusal(capsys, *command, "--experts", "num_selected=1")
    nll = {}
    for fields in ("num_selected=2", "num_selected=1"):
        output = tmp_path / f"{fields}.html"
        run_command(*command, "--output", output, "--experts", fields)
        [found] = json.loads(output.with_suffix(".json").read_text())["sets"].values()
        nll[fields] = found["figures"]["nll"]
    assert nll["num_selected=2"] != nll["num_selected=1"]
    assert not list(read_records(vmoe)), "another model than that of the run"


@pytest.mark.parametrize(("head", "keys"), [(DeterministicContrastiveConfig(), 3), (GaussianContrastiveConfig(), 1)])
def test_samples_of_dropout_are_keys_or_averaged_for_a_loss_that_takes_one_key(vmoe, lit_config, head, keys):
    run = open_run(vmoe)
    tower = run.config.task.require_image_tower()
    text = changed(lit_config.task.text_tower, embedding_size=tower.embedding_size)
    task = changed(lit_config.task, image_tower=tower, text_tower=text, head=head, loss=SoftmaxLoss())
    run = changed(run, config__task=task, task=task.build())
    assert with_experts(run, ["dropout_samples=3"]).task.num_predictions == keys
    assert with_experts(run, ["num_selected=1"]).task.num_predictions == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["num_selected"], "--experts num_selected is not FIELD=VALUE, such as num_selected=1"),
        (["num_selectd=1"], "--experts takes batch_priority, .*; num_selectd is none of them"),
        (["multi_pred=1"], "--experts multi_pred=1: multi_pred is True or False"),
        (["num_selected=one"], "--num-selected"),
        (["num_selected=7"], "num_selected = 7 is more than a member's 4 experts"),
        (["num_experts=8"], "num_experts is none of them"),
        (["permutation=3"], "permutation is none of them"),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message, vmoe, data, capsys):
    command = ["zero-shot", "--checkpoint", vmoe, "--data", data / "train", "--split", ".", "--experts", *fields]
    assert re.search(message, refusal(capsys, *command))


def test_a_tower_without_experts_is_named(upstream, data, capsys):
    command = ["zero-shot", "--checkpoint", upstream, "--data", data / "train", "--experts", "num_selected=1"]
    assert f"the image tower of {upstream} has no experts; leave out --experts" in refusal(capsys, *command)


def test_an_order_of_experts_that_are_not_loaded_is_refused(data, tmp_path):
    config = vmoe_config(data, tmp_path / "run", permutation=1)
    with pytest.raises(UserError, match=r"experts.permutation orders the experts of a trained image tower, and none"):
        train(config)
