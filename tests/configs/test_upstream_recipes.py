"""Upstream recipes and published grids, against the numbers that the papers print."""

from pathlib import Path
from typing import Any

import pytest

from lit_het.configs import experiment
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.data_pipelines.labels_config import MultiHot
from lit_het.heads.covariance import CovarianceConfig
from lit_het.search.grid import Axis, plan, with_published
from lit_het.search.shape.sweeps import shape_of
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Adafactor
from lit_het.training.schedules import ReverseSquareRoot, Schedule
from tests.refusals import assert_refused


def load(name: str) -> Any:
    return experiment.load_module_config(Path(f"configs/{name}"))


# HET-XL App. N.1 and Sec. 6.2: classes, epochs, peak, batch and weight decay (as printed, times the rate).
UPSTREAM_HET_XL = {
    "tower=resnet152,data_set=jft300m": (18_291, 7, 6e-4, 4096, 0.1),
    "tower=vit_l32,data_set=jft300m": (18_291, 7, 6e-4, 4096, 0.1),
    "tower=resnet152": (21_843, 90, 1e-3, 1024, 0.03),
    "tower=vit_l32": (21_843, 90, 1e-3, 4096, 0.1),
    "tower=resnet152,data_set=jft4b": (29_593, 1, 6e-4, 4096, 0.1),
    "tower=vit_l32,data_set=jft4b": (29_593, 1, 6e-4, 4096, 0.1),
}


@pytest.mark.parametrize(("arguments", "printed"), UPSTREAM_HET_XL.items())
def test_classifiers_of_many_classes_have_the_numbers_of_het_xl(arguments, printed):
    config = load(f"imagenet21k_het_xl.py:{arguments}")
    num_classes, epochs, rate, batch_size, weight_decay = printed
    assert (config.task.num_classes, config.length, config.data.batch_size) == (
        num_classes,
        Duration(epochs, "epochs"),
        batch_size,
    )
    assert config.optimizer.weight_decay == pytest.approx(rate * weight_decay)
    schedule = config.schedule
    assert (schedule.learning_rate, schedule.initial_rate, schedule.warmup) == (rate, 1e-5, Duration(10_000))
    assert config.task.head.covariance == CovarianceConfig(50, "efficient", learning_rate_factor=1.0)
    assert config.task.head.sampling.num_samples == 1000
    [evaluation] = config.evaluations
    assert evaluation.samples == 1000
    assert evaluation.data.multi_label == (num_classes != 21_843) == isinstance(config.data.labels, MultiHot)


def test_sovit_is_pretrained_with_the_numbers_of_table_5():
    sweep, large = load("sovit_upstream.py"), load("sovit_upstream.py:run=so400m")
    for config in (sweep, large):
        assert (config.data.image_size, config.task.image_tower.patch_size) == (224, 14)
        assert (config.data.crop, config.data.augmentations) == (InceptionCrop(), (HorizontalFlip(),))
        assert (config.optimizer.rule, config.optimizer.clip_norm) == (Adafactor(), 1.0)
        assert config.optimizer.weight_decay == pytest.approx(0.03 * 8e-4)
        decay = ReverseSquareRoot(Duration(10_000), Duration(50_000))
        assert config.schedule == Schedule(8e-4, Duration(10_000), decay=decay)
        assert config.task.image_tower.encoder.num_heads == 16
    assert sweep.data.batch_size == 128
    assert shape_of(sweep) == {"width": 1968, "depth": 40, "mlp": 6144}
    assert shape_of(large) == {"width": 1152, "depth": 27, "mlp": 4304}
    assert RunLength.resolve(large.length, large.data.batch_size, None).num_steps == int(40e9) // 4096


def test_experts_are_pretrained_for_the_epochs_of_their_sizes():
    """e3 App. A.2; App. B has E = 32 and K = 2."""
    printed = {"s32": 5, "b32": 7, "b16": 7, "l32": 7, "l16": 7, "h14": 14}
    for size, epochs in printed.items():
        config = load(f"upstream_experts.py:size={size}")
        assert config.length == Duration(epochs, "epochs")
        assert config.task.num_classes == 18_291
        experts, blocks = config.task.image_tower.encoder.experts, 5 if size == "h14" else 2
        assert (experts.num_experts, experts.num_selected, experts.num_blocks) == (32, 2, blocks)
        fine_tuned = load(f"fine_tune_experts.py:model=vmoe,size={size}").task.image_tower.encoder
        upstream = config.task.image_tower.encoder
        assert (upstream.width, upstream.depth, upstream.mlp_width) == (
            fine_tuned.width,
            fine_tuned.depth,
            fine_tuned.mlp_width,
        )
    assert load("upstream_experts.py:model=vit").task.image_tower.encoder.experts is None


# e3 Table 7: steps at factor 1, and base learning rates.
TABLE_7 = {
    "imagenet": (20_000, (0.0024, 0.003, 0.01, 0.03)),
    "cifar10": (5_000, (0.001, 0.003, 0.01, 0.03)),
    "cifar100": (5_000, (0.001, 0.003, 0.01, 0.03)),
    "pets": (500, (0.001, 0.003, 0.01, 0.03)),
    "flowers": (500, (0.001, 0.003, 0.01, 0.03)),
}


@pytest.mark.parametrize(("data_set", "printed"), TABLE_7.items())
def test_experts_are_fine_tuned_over_the_grid_of_table_7(data_set, printed):
    path, (steps, rates) = Path(f"configs/fine_tune_experts.py:data_set={data_set},model=vmoe"), printed
    config = load(path.name)
    assert config.length == Duration(steps)
    assert config.task.image_tower.encoder.experts.dropout_rate == 0.1
    axes = [Axis.parse(text) for text in with_published(["seed=1,2", "grid"], path)]
    expected = {"length": [steps * factor for factor in (0.5, 1.0, 1.5, 2.0)], "schedule.learning-rate": [*rates]}
    assert {axis.field: [*map(float, axis.values)] for axis in axes[1:]} == expected
    assert len(plan(config, axes[1:], [0], Path("runs/unused"))) == 16


def test_a_file_without_a_grid_is_refused():
    message = r"quickstart_upstream\.py has no get_grid\(\); see the shipped fine_tune_experts\.py"
    assert_refused(message, with_published, ["grid"], Path("configs/quickstart_upstream.py"))
