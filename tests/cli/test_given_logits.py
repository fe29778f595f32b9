"""A run with a `get_logits` of the user's own: it is trained, opened again, and refused where the function is not."""

import dataclasses
import json

from flax import nnx

from lit_het import parameters
from lit_het.configs import quickstart_lit_het_xl
from lit_het.heads import HetXLConfig, get_logits, logits_config
from lit_het.models.opening import open_run
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import refusal


@get_logits
def twice(feature_size, num_classes, rngs):
    """Two layers, in place of one."""
    hidden = nnx.Linear(feature_size, 3, rngs=rngs)
    return nnx.Sequential(hidden, nnx.relu, nnx.Linear(3, num_classes, rngs=rngs))


def test_a_run_with_logits_of_the_users_own_is_trained_and_opened_where_the_function_is(
    capsys, data, tmp_path, monkeypatch
):
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path / "run")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, head=HetXLConfig(get_logits=twice)))
    train(config)
    saved = json.loads((config.run_dir / "config.json").read_text())
    name = f"{__name__}:twice"
    assert saved["task"]["head"]["get_logits"] == {"type": "GivenLogits", "name": name}
    run = open_run(config.run_dir)
    assert run.config.task == config.task
    assert parameters.flatten(run.params)["head/logits/function/layers/0/kernel"].shape[1] == 3
    for to in ("huggingface", "npz"):
        place = tmp_path / f"exported.{to}"
        line = refusal(capsys, "export", "--checkpoint", config.run_dir, "--to", to, "--output", place)
        assert f"--to {to} has classifiers of one dense layer, not GivenLogits; export with --to lit-het" in line
    monkeypatch.delitem(logits_config._GIVEN, name)
    line = refusal(capsys, "train", "--config", config.run_dir / "config.json", "--resume")
    assert f"config.json does not fit this version of lit-het: GivenLogits: name = '{name}' is a function that" in line
