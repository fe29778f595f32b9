"""Contracts that every configuration keeps."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import experiment, fine_tune_experts
from lit_het.data_pipelines.augment import HorizontalFlip, RandomAffine
from lit_het.data_pipelines.labels import CaptionWords
from lit_het.data_pipelines.rand_augment import RandAugment
from lit_het.data_pipelines.tokenizers import SentencePieceConfig
from lit_het.data_pipelines.transforms import InceptionCrop, Preprocessing
from lit_het.durations import Duration, RunLength
from lit_het.errors import UserError
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.heads.prob_vlm import ProbVLMContrastiveConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.optimizers import Adafactor, ParameterGroup
from lit_het.runs.parsing import parse_config
from lit_het.schedules import Schedule
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask
from lit_het.tasks.mixing import Mixing
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.step import initial_state, make_train_step
from lit_het.types import Batch

EVALUATIONS = sorted(Path("configs").glob("*_evaluations.py"))
OTHERS = [Path("configs/__init__.py"), Path("configs/experiment.py"), *EVALUATIONS]
CONFIGS = sorted(set(Path("configs").glob("*.py")) - set(OTHERS))
# Files whose get_config takes arguments, with all values.
WITH_ARGUMENTS = {
    "imagenet21k_het_xl": ["tower=vit_l32", "tower=resnet152"],
    "fine_tune_imagenet": [f"image_size={size}" for size in (224, 384, 518)],
    "fine_tune_experts": [
        f"data_set={data_set},model={model}"
        for data_set in ("imagenet", "cifar10", "cifar100", "pets", "flowers")
        for model in ("vit", "vmoe", "e3")
    ]
    + [f"model={model}" for model in get_args(fine_tune_experts.Model)],
    "glyph_classifier": ["minival=0", "minival=5"],
    "imagenet_experts": ["model=vmoe", "model=e3"],
}
RECIPES = [
    *(path for path in CONFIGS if path.stem not in WITH_ARGUMENTS),
    *(Path(f"configs/{stem}.py:{arguments}") for stem, all_of in WITH_ARGUMENTS.items() for arguments in all_of),
]
# In full size.
TRACED = [
    Path(f"configs/{name}")
    for name in (
        "imagenet21k_het_xl.py",
        "imagenet21k_het_xl.py:tower=resnet152",
        "lit_so400m_het_xl.py",
        "lit_so400m_sigmoid.py",
        "lit_gigantic14_het_xl.py",
        "prolip_b16.py",
        "lit_decoder_so400m.py",
        "coca_large.py",
        "siglip2_b16.py",
        "translation_base.py:data=/data/wmt14",
        "fine_tune_imagenet.py:image_size=384",
        "linear_probe_imagenet.py",
        "fine_tune_experts.py:model=vit",
        "fine_tune_experts.py:model=e3",
        "fine_tune_experts.py:model=batch_ensemble",
        "fine_tune_experts.py:model=mimo",
        "imagenet_experts.py:model=vmoe",
    )
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_config_survives_a_round_trip_through_json(path, tmp_path):
    config = experiment.load_module_config(path)
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config


HEADS = [
    DeterministicConfig(initial_bias=-6.9),
    HetConfig(CovarianceConfig(2, "full", "diagonal")),
    HetHConfig(num_buckets=2, hash_seed=3),
    HetXLConfig(sampling=SamplingConfig(num_samples=2, order="factored")),
    HetXLConfig(unshared_size=5),
]


@pytest.mark.parametrize("tower", [ViTConfig(32, 16), ResNetConfig(101, 2)], ids=lambda tower: type(tower).__name__)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_classifier_survives_a_round_trip_through_json_with_its_class_names(head, tower, tmp_path):
    upstream = experiment.load_module_config(Path("configs/quickstart_upstream.py"))
    config = dataclasses.replace(upstream, task=ClassificationConfig(tower, head, num_classes=3))
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config
    saved = json.loads((tmp_path / "config.json").read_text())["task"]
    assert saved["type"] == "ClassificationConfig"
    assert saved["head"]["type"] == type(head).__name__
    assert saved["image_tower"]["type"] == type(tower).__name__


LIT_HEADS = [
    DeterministicContrastiveConfig(),
    HetXLContrastiveConfig(noisy="text", order="direct"),
    GaussianContrastiveConfig(inclusion=0.0),
    ProbVLMContrastiveConfig(dropout=0.2),
    BayesVLMContrastiveConfig(prediction="probit"),
    McDropoutContrastiveConfig(dropout=0.2),
]


@pytest.mark.parametrize("loss", [SoftmaxLoss("ring", 8), SigmoidLoss("dense")], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("head", LIT_HEADS, ids=lambda head: type(head).__name__)
def test_every_contrastive_head_and_loss_survives_a_round_trip_through_json(head, loss, tmp_path):
    lit = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    config = dataclasses.replace(lit, task=dataclasses.replace(lit.task, head=head, loss=loss))
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config
    saved = json.loads((tmp_path / "config.json").read_text())["task"]
    assert (saved["head"]["type"], saved["loss"]["type"]) == (type(head).__name__, type(loss).__name__)


def test_transforms_of_images_survive_a_round_trip_through_json(tmp_path):
    config = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    data = dataclasses.replace(
        config.data,
        preprocessing=Preprocessing("crop", 0.875, "bicubic"),
        crop=InceptionCrop(0.2, 0.9),
        augmentations=(HorizontalFlip(), RandAugment(2, 9.0), RandomAffine(1.0)),
    )
    config = dataclasses.replace(config, data=data)
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config
    saved = json.loads((tmp_path / "config.json").read_text())["data"]
    assert [change["type"] for change in saved["augmentations"]] == ["HorizontalFlip", "RandAugment", "RandomAffine"]


def test_pcme_plus_plus_is_a_line_of_flags():
    flags = "--task.head gaussian --task.loss sigmoid --task.loss.pseudo-positives 0.1 --task.mixing.fraction 0.5"
    task = parse_config(Path("configs/quickstart_lit_het_xl.py"), flags.split()).task
    assert isinstance(task, ContrastiveConfig)
    assert isinstance(task.head, GaussianContrastiveConfig)
    assert isinstance(task.loss, SigmoidLoss)
    assert task.loss.pseudo_positives == 0.1
    assert task.mixing == Mixing(0.5)


def test_mixup_is_a_flag():
    config = parse_config(Path("configs/quickstart_upstream.py"), ["--task.mixup", "0.2"])
    assert isinstance(config.task, ClassificationConfig)
    assert config.task.mixup == 0.2


def test_transforms_of_images_have_flags():
    flags = ["--data.augmentations.0.max-shift-pixels", "3", "--data.preprocessing.filter", "fast"]
    data = parse_config(Path("configs/quickstart_upstream.py"), flags).data
    (change,) = data.augmentations
    assert isinstance(change, RandomAffine)
    assert (change.max_shift_pixels, change.max_shear_degrees) == (3.0, 5.7)
    assert data.preprocessing == Preprocessing(filter="fast")


@pytest.mark.parametrize("path", TRACED, ids=lambda path: path.name)
def test_a_config_in_full_size_has_a_train_step(path):
    """It is traced, neither compiled nor run: what does not fit is found in a second."""
    config = experiment.load_module_config(path)
    size, mesh = config.data.image_size, config.mesh.build()
    with jax.set_mesh(mesh):
        task = config.task.build()
        run = RunLength.resolve(config.length, config.data.batch_size, epoch_size=1_281_167)
        optimizer = config.optimizer.build(config.schedule, run, task.layers_above, task.learning_rates)
        shapes = task.shapes
        locked, trainable = parameters.partition(shapes, task.locked)
        state = jax.eval_shape(functools.partial(initial_state, optimizer=optimizer), trainable)

        def batch():
            rows = config.data.batch_size
            label = jnp.zeros(rows, jnp.int32)
            if isinstance(config.data.labels, CaptionWords):
                assert isinstance(config.task, ClassificationConfig)
                label = jnp.zeros((rows, config.task.num_classes))
            text = jnp.zeros((rows, config.tokenizer.length), jnp.int32) if config.tokenizer else None
            image = jnp.zeros((rows, size, size, 3), jnp.uint8)
            target = None if text is None else jnp.ones(text.shape, bool)
            source = None if config.data.source is None else text
            return Batch(jnp.ones(rows, bool), image, source=source, text=text, text_target=target, label=label)

        step = make_train_step(task, optimizer, config.seed)
        after, metrics = jax.eval_shape(step, state, locked, jax.eval_shape(batch))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == ()


def test_a_file_may_have_arguments_with_choices_of_their_own():
    config = parse_config(Path("configs/fine_tune_imagenet.py:image_size=384"), ["--length", "7"])
    assert (config.data.image_size, config.length) == (384, Duration(7))
    for wrong in ("image_size=300", "size=384", "image_size"):
        with pytest.raises(
            UserError, match=rf"fine_tune_imagenet.py does not accept '{wrong}'; it accepts image_size=224"
        ):
            experiment.load_module_config(Path(f"configs/fine_tune_imagenet.py:{wrong}"))


def test_the_decoder_has_the_settings_of_its_table():
    """SoViT Table 6 and Sec. 4.2."""
    config = experiment.load_module_config(Path("configs/lit_decoder_so400m.py"))
    task, data = config.task, config.data
    assert isinstance(task, CaptioningConfig)
    assert (data.image_size, data.batch_size, config.length) == (224, 512, Duration(50, "epochs"))
    assert (data.preprocessing.fit, data.preprocessing.crop_fraction) == ("crop", 224 / 256)
    assert isinstance(config.optimizer.rule, Adafactor)
    assert (config.optimizer.clip_norm, config.optimizer.weight_decay) == (1.0, 1e-4)
    assert config.schedule == Schedule(3e-4, warmup=Duration(10, "percent"))
    assert (task.loss.label_smoothing, task.decoder.dropout, task.decoder.vocabulary_size) == (0.1, 0.1, 32_000)
    assert task.decoder.encoder.depth == 2


def test_recipes_have_the_numbers_of_their_tables():
    """SoViT Tables 8 and 9; e3 App. A.3 and Table 7."""

    def load(name) -> Any:
        return experiment.load_module_config(Path(f"configs/{name}"))

    small, large = load("fine_tune_imagenet.py:image_size=224"), load("fine_tune_imagenet.py:image_size=518")
    probe = load("linear_probe_imagenet.py")
    assert [config.optimizer.layer_decay for config in (small, large, probe)] == [0.85, 0.9, 1.0]
    assert [config.task.mixup for config in (small, large, probe)] == [0.0, 0.2, 0.1]
    assert [config.optimizer.clip_norm for config in (small, large, probe)] == [1.0, 1.0, None]
    assert [len(config.data.augmentations) for config in (small, large, probe)] == [1, 2, 1]
    locked = parameters.partition(probe.task.build().shapes, probe.task.locked)
    assert parameters.count(locked[1]) == 1153 * 1000
    run = RunLength.resolve(probe.length, probe.data.batch_size, len(probe.data.portion.sample_range(1_281_167)))
    assert run.steps(Duration(10, "epochs"), "length") == pytest.approx(24_700, rel=0.004)
    flowers = load("fine_tune_experts.py:data_set=flowers,model=e3")
    minival = flowers.evaluations[0].data.portion
    assert (len(flowers.data.portion.sample_range(1020)), len(minival.sample_range(1020))) == (918, 102)
    experts = flowers.task.image_tower.encoder.experts
    assert (experts.capacity_factor, experts.eval_capacity_factor, experts.dropout_rate) == (1.5, 8.0, 0.1)


def test_upstream_recipes_have_the_numbers_of_their_tables():
    """SoViT Table 7; HET-XL App. N.1 and N.2."""

    def load(name) -> Any:
        return experiment.load_module_config(Path(f"configs/{name}"))

    sigmoid, both, gigantic = (
        load(f"lit_{name}.py") for name in ("so400m_sigmoid", "so400m_het_xl", "gigantic14_het_xl")
    )
    assert (sigmoid.data.batch_size, both.data.batch_size, gigantic.data.batch_size) == (2**15, 2**15, 2**14)
    for config, peak_at in ((sigmoid, 5493), (both, 5493), (gigantic, 10_000)):
        run = RunLength.resolve(config.length, config.data.batch_size, None)
        assert run.steps(config.schedule.warmup, "warmup") == peak_at
        assert config.schedule.learning_rate == 1e-3
        assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (1e-4, 1.0)
        assert config.optimizer.rule == Adafactor()
        assert config.data.crop is None
        assert config.data.augmentations == ()
        assert config.task.text_tower.vocabulary_size == 32_000
    assert RunLength.resolve(gigantic.length, 2**14, None).num_steps == 18_000_000_000 // 2**14
    assert (sigmoid.task.head.temperature.initial, sigmoid.task.head.initial_bias) == (0.1, -10.0)
    head = gigantic.task.head
    assert (head.covariance.num_factors, head.covariance.form, head.num_samples) == (15, "full", 1)
    assert (head.covariance.learning_rate_factor, head.temperature.learning_rate_factor) == (1.0, 1.0)
    assert head.temperature.initial == pytest.approx(1 / 3)
    # The recommended recipe: the paper's factors, but samples that can pay, and LiT's temperature.
    assert (both.task.head.covariance.num_factors, both.task.head.num_samples) == (15, 16)
    assert both.task.head.temperature.initial == pytest.approx(1 / 10)
    shapes = gigantic.task.build().shapes
    # The blocks of ViT-G and ViT-g (Zhai et al. 2022, Table 2).
    assert parameters.count(shapes["image_tower"]["encoder"]) == pytest.approx(1843e6, rel=0.005)
    assert parameters.count(shapes["text_tower"]["encoder"]) == pytest.approx(1011e6, rel=0.005)

    transformer, resnet = (load(f"imagenet21k_het_xl.py:tower={tower}") for tower in ("vit_l32", "resnet152"))
    for config, batch_size, weight_decay in ((transformer, 4096, 0.1), (resnet, 1024, 0.03)):
        assert config.data.batch_size == batch_size
        assert config.optimizer.weight_decay == pytest.approx(1e-3 * weight_decay)
        assert config.length == Duration(90, "epochs")
        assert (config.schedule.initial_rate, config.schedule.warmup) == (1e-5, Duration(10_000))
        assert config.task.head.covariance == CovarianceConfig(50, "efficient", learning_rate_factor=1.0)
        assert config.task.head.sampling.num_samples == 1000


def test_the_so400m_config_has_the_published_shapes_and_factors():
    config = experiment.load_module_config(Path("configs/lit_so400m_het_xl.py"))
    assert isinstance(config.task, ContrastiveConfig)
    shapes = config.task.build().shapes
    # SoViT Table 1 rounds the tower with its pooling head to 428 M.
    assert parameters.count(shapes["image_tower"]) == pytest.approx(428e6, rel=0.005)
    d, r = 1152, 15
    one_side = (d * d * r + d * r) + (d * d + d)  # full factors and the second term, kernels and biases
    assert parameters.count(shapes["head"]) == 2 * one_side + 1  # and the temperature
    assert RunLength.resolve(config.length, config.data.batch_size, None).num_steps == 900_000_000 // 32_768
    locked, trainable = parameters.partition(shapes, config.task.locked)
    assert set(locked) == {"image_tower"}
    assert set(trainable) == {"text_tower", "head"}


# SoViT Table 1, by XLA's count.
@pytest.mark.parametrize(("image_size", "gflop"), [(224, 221), (384, 672), (518, 1374)])
def test_the_so400m_tower_costs_the_published_floating_point_operations(image_size, gflop):
    tower = experiment.load_module_config(Path("configs/lit_so400m_het_xl.py")).task.image_tower
    assert isinstance(tower, ViTConfig)
    # The cost of a scan is counted once by XLA, so blocks are unrolled; float32 keeps conversions out of the count.
    encoder = dataclasses.replace(tower.encoder, unrolled=True, compute_type="float32")
    tower = dataclasses.replace(tower, encoder=encoder, image_size=image_size)
    task = ContrastiveTask(ContrastiveConfig(tower, TextConfig(embedding_size=1152)))
    shapes = task.shapes
    image = jax.ShapeDtypeStruct((1, image_size, image_size, 3), np.uint8)
    cost = jax.jit(task.features).lower(shapes, image).cost_analysis()
    assert cost is not None
    assert cost["flops"] / 1e9 == pytest.approx(gflop, rel=0.02)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_list_of_evaluations_survives_a_round_trip_through_json(path, tmp_path):
    config = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    config = dataclasses.replace(config, evaluations=experiment.load_evaluations(path))
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config


def test_differences_name_the_dotted_field_and_both_values():
    config = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    other = dataclasses.replace(config, seed=7)
    assert experiment.differences(config, other) == {"seed": (0, 7)}


def test_a_saved_config_with_an_unknown_field_is_refused_by_name(tmp_path):
    config = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    experiment.save(config, tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text().replace('"length"', '"number_of_steps"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="number_of_steps"):
        experiment.load(tmp_path / "config.json")


def test_a_pattern_in_json_that_would_hang_is_refused_with_the_file(tmp_path):
    config = experiment.load_module_config(Path("configs/quickstart_lit_het_xl.py"))
    for change in (
        {"task": dataclasses.replace(config.task, locked=("(.|.)*X",))},
        {"pretrained": experiment.PretrainedConfig(Path("run"), "(.|.)*X")},
        {"optimizer": dataclasses.replace(config.optimizer, groups=(ParameterGroup("(.|.)*X"),))},
    ):
        experiment.save(dataclasses.replace(config, **change), tmp_path / "config.json")
        with pytest.raises(UserError, match=r"config\.json: '\(\.\|\.\)\*X' cannot be used"):
            experiment.load(tmp_path / "config.json")


def test_a_run_of_before_punctuation_could_be_removed_keeps_it(tmp_path):
    config = experiment.to_dict(experiment.load_module_config(Path("configs/lit_so400m_het_xl.py")))
    del config["tokenizer"]["remove_punctuation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = experiment.load(tmp_path / "config.json").tokenizer
    assert isinstance(tokenizer, SentencePieceConfig)
    assert not tokenizer.remove_punctuation


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_run_of_before_losses_were_objects_is_read(loss, tmp_path):
    config = experiment.to_dict(experiment.load_module_config(Path("configs/quickstart_upstream.py")))
    config["task"]["loss"] = loss
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = experiment.load(tmp_path / "config.json").task
    assert isinstance(task, ClassificationConfig)
    assert isinstance(task.loss, {"softmax": SoftmaxCrossEntropy, "sigmoid": SigmoidCrossEntropy}[loss])


def test_a_file_without_get_config_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"empty\.py has no get_config"):
        experiment.load_module_config(tmp_path / "empty.py")
