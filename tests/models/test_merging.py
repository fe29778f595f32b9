"""Means of weights and greedy soups."""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.configs import fine_tune_pair, flyp_imagenet
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizerConfig, SentencePieceConfig
from lit_het.errors import UserError
from lit_het.heads.contrastive import HetXLContrastiveConfig
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.heads.temperature_config import FixedTemperature, LogTemperature
from lit_het.models.merging import check_same_model, greedy_soup, mean
from lit_het.models.opening import Run
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration
from lit_het.weights.huggingface import image_processors
from lit_het.weights.importing import open_imported


def test_a_mean_is_the_weighted_sum_of_each_parameter_in_its_own_type():
    first = {"a": jnp.asarray([1.0, 2.0]), "b": {"c": jnp.asarray([4.0], jnp.bfloat16)}}
    second = {"a": jnp.asarray([3.0, -2.0]), "b": {"c": jnp.asarray([8.0], jnp.bfloat16)}}
    found = mean([first, second], [0.25, 0.75])
    np.testing.assert_allclose(found["a"], [2.5, -1.0])
    assert found["b"]["c"].dtype == jnp.bfloat16
    assert float(found["b"]["c"][0]) == 7.0


def test_a_model_stays_where_the_mean_with_it_is_no_worse():
    """Scores of the mean of numbers: the nearer to 5, the better."""
    models = [1.0, 4.0, 9.0, 7.0]
    tries = greedy_soup(models, lambda kept: -abs(5 - sum(kept) / len(kept)))
    # 4 is best alone; with 7 the mean is 5.5, which is better; with 1 it is 4, and with 9 it is 6.67: both worse.
    assert [(one.number, one.kept) for one in tries] == [(1, True), (3, True), (0, False), (2, False)]
    assert [one.alone for one in tries] == [-1, -2, -4, -4]
    assert tries[1].score == -0.5


def test_equal_models_all_stay():
    assert all(one.kept for one in greedy_soup([2.0, 2.0, 2.0], lambda kept: sum(kept) / len(kept)))


GOLDEN = Path(__file__).parents[1] / "golden"
PIECES = SentencePieceConfig(Path("a"))
TOKENIZER = SimpleNamespace(model_bytes=b"x", padding_id=1)


def run(run_dir="one", tokenizer: Any = PIECES, built: Any = TOKENIZER, **of_head: Any):
    """Returns a run without parameters, for the comparison with another."""
    encoder = EncoderConfig(width=16, depth=1, mlp_width=16, num_heads=2)
    task = ContrastiveConfig(
        ViTConfig(8, 4, encoder), TextConfig(20, 4, 16, encoder), HetXLContrastiveConfig(**of_head), locked=()
    )
    config = ExperimentConfig(Path(run_dir), task, LoaderConfig((), 8), Duration(0), tokenizer=tokenizer)
    return Run(Path(run_dir), config, task.build(), {}, built, step=0)


@pytest.mark.parametrize(
    ("tokenizer", "field"),
    [
        (SentencePieceConfig(Path("b")), None),
        (SentencePieceConfig(Path("a"), padding_id=1), None),
        (SentencePieceConfig(Path("a"), lowercase=False), "lowercase"),
        (SentencePieceConfig(Path("a"), remove_punctuation=True), "remove_punctuation"),
        (SentencePieceConfig(Path("a"), split_underscores=True), "split_underscores"),
        (HuggingFaceTokenizerConfig(Path("a")), "type"),
    ],
)
def test_only_runs_that_read_texts_alike_are_of_one_model(tokenizer, field):
    with pytest.raises(UserError, match=rf"different tokenizers \({field}\)") if field else nullcontext():
        check_same_model(run(), run("two", tokenizer))


def test_only_runs_that_pad_and_number_texts_alike_are_of_one_model():
    for name, built in {"padding_id": (b"x", 0), "model": (b"y", 1)}.items():
        other = run("two", built=SimpleNamespace(model_bytes=built[0], padding_id=built[1]))
        with pytest.raises(UserError, match=rf"different tokenizers \({name}\)"):
            check_same_model(run(), other)


@pytest.mark.parametrize(
    ("of_head", "field"),
    [
        ({"temperature": LogTemperature(0.01, learning_rate_factor=1.0), "num_samples": 4}, None),
        ({"covariance": CovarianceConfig(15, initial_noise_norm=0.2, learning_rate_factor=0.5)}, None),
        ({"covariance": CovarianceConfig(15, second_term="diagonal")}, "covariance.second_term"),
        ({"temperature": FixedTemperature()}, "temperature"),
        ({"normalize_after_noise": True}, "normalize_after_noise"),
    ],
)
def test_heads_may_be_trained_but_not_computed_otherwise(of_head, field):
    with pytest.raises(UserError, match=rf"has task.head.{field}") if field else nullcontext():
        check_same_model(run(), run("two", **of_head))


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [("siglip_b16", "hf_siglip"), ("clip_b16", "hf_clip"), ("flyp", "hf_clip")],
)
def test_a_shipped_recipe_trains_the_model_that_the_import_evaluates(recipe, folder):
    imported = open_imported(str(GOLDEN / folder))
    config = flyp_imagenet.get_config() if recipe == "flyp" else fine_tune_pair.get_config(recipe, "lora")
    task = dataclasses.replace(config.task, **imported.config.task.towers)
    data = dataclasses.replace(config.data, image_size=imported.config.data.image_size)
    trained = dataclasses.replace(config, task=task, data=data)
    check_same_model(imported, dataclasses.replace(imported, run_dir=config.run_dir, config=trained))


def test_the_recipe_of_siglip_2_reads_images_as_its_file_says():
    processor = {"resample": 2, "size": {"height": 224, "width": 224}}  # google/siglip2-base-patch16-224
    expected = image_processors.read(processor, 224).preprocessing
    assert fine_tune_pair.get_config("siglip2_b16").data.preprocessing == expected


@pytest.mark.parametrize("models", [[math.nan, 1.0, 3.0, math.nan, 2.0], [1.0, math.nan, 3.0, 2.0, math.nan]])
def test_models_that_score_nan_are_tried_last_and_left_out(models):
    tries = greedy_soup(models, max_or_nan)
    assert [models[one.number] for one in tries[:3]] == [3.0, 2.0, 1.0]
    assert [one.kept for one in tries] == [True, True, True, False, False]


def test_there_is_no_soup_where_all_score_nan():
    with pytest.raises(UserError, match="the figure of every run is NaN"):
        greedy_soup([math.nan, math.nan], max_or_nan)


def max_or_nan(kept):
    return math.nan if any(map(math.isnan, kept)) else max(kept)
