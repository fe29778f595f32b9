"""Contracts that every configuration keeps."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import (
    dino_txt,
    experiment,
    fine_tune_experts,
    fine_tune_pair,
    fine_tune_vtab,
    imagenet21k_het_xl,
    lit_xlm_r,
    upstream_experts,
)
from lit_het.configs.parsing import parse_config
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandomAffine
from lit_het.data_pipelines.images.rand_augment import RandAugment
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.texts.captions_config import classes_of
from lit_het.data_pipelines.texts.tokenizers import SentencePieceConfig
from lit_het.errors import UserError
from lit_het.eval.sets.benchmarks import VTAB_1K
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.logits_config import HierarchicalSoftmax, SampledSoftmax
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.heads.prob_vlm import ProbVLMContrastiveConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.objectives.mixing import Mixing
from lit_het.paths import shipped_configs
from lit_het.planning.plan import Step
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.towers import attention
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Adafactor, AdamW, ParameterGroup
from lit_het.training.schedules import Schedule

EVALUATIONS = sorted(Path("configs").glob("*_evaluations.py"))
CONFIGS = [Path(f"configs/{name}.py") for name in shipped_configs()]
# Files whose get_config takes arguments, with all values.
WITH_ARGUMENTS = {
    "imagenet21k_het_xl": [
        f"tower={tower},data_set={data_set}"
        for tower in ("vit_l32", "resnet152")
        for data_set in get_args(imagenet21k_het_xl.DataSet)
    ],
    "sovit_upstream": ["run=sweep", "run=so400m"],
    "upstream_experts": [
        f"model={model},size={size}" for model in ("vit", "vmoe") for size in get_args(upstream_experts.Size)
    ],
    "fine_tune_imagenet": [f"image_size={size}" for size in (224, 384, 518)],
    "fine_tune_experts": [
        f"data_set={data_set},model={model}"
        for data_set in ("imagenet", "cifar10", "cifar100", "pets", "flowers")
        for model in ("vit", "vmoe", "e3")
    ]
    + [f"model={model}" for model in get_args(fine_tune_experts.Model)],
    "fine_tune_pair": [
        f"model={model},adapt={adapt}"
        for model in get_args(fine_tune_pair.Model)
        for adapt in get_args(fine_tune_pair.Adapt)
    ],
    "fine_tune_vtab": [
        *(f"task={task}" for task in get_args(fine_tune_vtab.Task)),
        *(f"size={size}" for size in get_args(fine_tune_vtab.Size)),
    ],
    "dino_txt": [f"model={model}" for model in get_args(dino_txt.Model)],
    "lit_xlm_r": [f"size={size}" for size in get_args(lit_xlm_r.Size)],
    "uvim_so400m": ["tower=trained", "tower=locked"],
    "glyph_classifier": ["minival=0", "minival=5"],
    "imagenet_experts": ["model=vmoe", "model=e3"],
}
RECIPES = [
    *(path for path in CONFIGS if path.stem not in WITH_ARGUMENTS),
    *(Path(f"configs/{stem}.py:{arguments}") for stem, all_of in WITH_ARGUMENTS.items() for arguments in all_of),
]
# In full size.
TRACED = (
    "imagenet21k_het_xl.py",
    "imagenet21k_het_xl.py:tower=resnet152",
    "sovit_upstream.py",
    "upstream_experts.py:size=h14",
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
    "fine_tune_experts.py:model=e3",
    "fine_tune_vtab.py:size=h14",
    "fine_tune_pair.py:model=clip_b16,adapt=lora",
    "fine_tune_pair.py:model=siglip2_b16,adapt=last_4",
    "imagenet_experts.py:model=vmoe",
    "flyp_imagenet.py",
    "dino_txt.py",
    "lit_xlm_r.py",
    "uvim_oracle.py",
    "uvim_so400m.py:tower=trained",
)
# The other tasks are traced by tests of their own, in small, and other kinds of experts by test_published_costs.py.
SHORT = ("lit_so400m_het_xl.py", "fine_tune_experts.py:model=e3")


def load(name) -> Any:
    return experiment.load_module_config(Path(f"configs/{name}"))


def saved(config, folder) -> Any:
    """Saves a configuration, checks that it is read again as it was, and returns its JSON."""
    experiment.save(config, folder / "config.json")
    assert experiment.load(folder / "config.json") == config
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_config_survives_a_round_trip_through_json(path, tmp_path):
    saved(experiment.load_module_config(path), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "imagenet21k_het_xl.py:tower=resnet152",
        "siglip2_b16.py",
        "prolip_b16.py",
        "translation_base.py:data=/data/wmt14",
        "fine_tune_experts.py:model=batch_ensemble",
        "lit_e3_b32_het_xl.py",
    ],
)
def test_parameters_are_float32_also_where_jax_counts_in_float64(name):
    task = load(name).task.build()
    with jax.enable_x64(True):
        shapes = jax.eval_shape(task.initialize, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


HEADS = [
    DeterministicConfig(initial_bias=-6.9),
    HetConfig(CovarianceConfig(2, "full", "diagonal")),
    HetHConfig(num_buckets=2, hash_seed=3),
    HetXLConfig(sampling=SamplingConfig(num_samples=2, order="factored")),
    HetXLConfig(unshared_size=5),
    HetXLConfig(get_logits=SampledSoftmax(3, "log_uniform")),
    DeterministicConfig(get_logits=HierarchicalSoftmax()),
]
LIT_HEADS = [
    DeterministicContrastiveConfig(),
    HetXLContrastiveConfig(noisy="text", order="direct"),
    GaussianContrastiveConfig(inclusion=0.0),
    ProbVLMContrastiveConfig(dropout=0.2),
    BayesVLMContrastiveConfig(prediction="probit"),
    McDropoutContrastiveConfig(dropout=0.2),
]
CLASSIFIERS = [
    {"image_tower": tower, "head": head, "loss": SoftmaxCrossEntropy(), "num_classes": 3}
    for tower in (ViTConfig(32, 16), ResNetConfig(101, 2))
    for head in HEADS
]
CONTRASTIVE = [
    {"head": head, "loss": loss} for loss in (SoftmaxLoss("ring", 8), SigmoidLoss("dense")) for head in LIT_HEADS
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("quickstart_upstream.py", changes) for changes in CLASSIFIERS),
        *(("quickstart_lit_het_xl.py", changes) for changes in CONTRASTIVE),
    ],
)
def test_every_head_loss_and_tower_survives_a_round_trip_through_json_with_its_class_name(name, changes, tmp_path):
    config = load(name)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, **changes))
    task = saved(config, tmp_path)["task"]
    assert task["type"] == type(config.task).__name__
    for field in changes.keys() - {"num_classes"}:
        assert task[field]["type"] == type(changes[field]).__name__


def test_transforms_of_images_survive_a_round_trip_through_json(tmp_path):
    config = load("quickstart_lit_het_xl.py")
    data = dataclasses.replace(
        config.data,
        preprocessing=Preprocessing("crop", 0.875, "bicubic"),
        crop=InceptionCrop(0.2, 0.9),
        augmentations=(HorizontalFlip(), RandAugment(2, 9.0), RandomAffine(1.0)),
    )
    found = saved(dataclasses.replace(config, data=data), tmp_path)["data"]
    assert [change["type"] for change in found["augmentations"]] == ["HorizontalFlip", "RandAugment", "RandomAffine"]


def test_pcme_plus_plus_is_a_line_of_flags():
    flags = "--task.head gaussian --task.loss sigmoid --task.loss.pseudo-positives 0.1 --task.mixing.fraction 0.5"
    task = parse_config(Path("configs/quickstart_lit_het_xl.py"), flags.split()).task
    assert isinstance(task, ContrastiveConfig)
    assert isinstance(task.head, GaussianContrastiveConfig)
    assert isinstance(task.loss, SigmoidLoss)
    assert (task.loss.pseudo_positives, task.mixing) == (0.1, Mixing(0.5))


def test_softmaxes_of_many_classes_and_likelihoods_without_samples_are_flags():
    path = Path("configs/imagenet21k_het_xl.py")
    flags = "--task.loss softmax --task.head.get-logits sampled_softmax --task.head.get-logits.num-candidates 512"
    task = parse_config(path, flags.split()).task
    assert isinstance(task, ClassificationConfig)
    assert task.head.get_logits == SampledSoftmax(512)
    flags = "--task.loss softmax --task.loss.likelihood delta --task.head.sampling.num-samples 0"
    task = parse_config(path, flags.split()).task
    assert isinstance(task, ClassificationConfig)
    assert (task.loss, task.head.sampling.num_samples) == (SoftmaxCrossEntropy(likelihood="delta"), 0)


def test_mixup_and_transforms_of_images_have_flags():
    flags = "--task.mixup 0.2 --data.augmentations.0.max-shift-pixels 3 --data.preprocessing.filter fast"
    config = parse_config(Path("configs/quickstart_upstream.py"), flags.split())
    assert isinstance(config.task, ClassificationConfig)
    assert config.task.mixup == 0.2
    (change,) = config.data.augmentations
    assert isinstance(change, RandomAffine)
    assert (change.max_shift_pixels, change.max_shear_degrees) == (3.0, 5.7)
    assert config.data.preprocessing == Preprocessing(filter="fast")


@pytest.mark.devices
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in TRACED]
)
def test_a_config_in_full_size_has_a_train_step(name):
    """It is traced, neither compiled nor run: what does not fit is found in a second."""
    config = load(name)
    config.schedule.build(RunLength.resolve(config.length, config.data.batch_size, epoch_size=305_000_000))
    planned = Step(config, config.mesh.build())
    state, locked, batch = planned.inputs.state, planned.inputs.locked, planned.inputs.batch
    with jax.set_mesh(planned.mesh):
        after, metrics = jax.eval_shape(planned._step, state, locked, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == ()


def test_a_file_may_have_arguments_with_choices_of_their_own():
    config = parse_config(Path("configs/fine_tune_imagenet.py:image_size=384"), ["--length", "7"])
    assert (config.data.image_size, config.length) == (384, Duration(7))
    with pytest.raises(UserError, match="does not accept 'image_size=300'; it accepts image_size=224"):
        load("fine_tune_imagenet.py:image_size=300")


def test_the_decoder_has_the_settings_of_its_table():
    """SoViT Table 6 and Sec. 4.2."""
    config = load("lit_decoder_so400m.py")
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
    searched: Any = experiment.load_evaluations(Path("configs/linear_probe_imagenet.py"))[0]
    axes = (searched.fit.learning_rates, searched.fit.weight_decays, searched.fit.epochs, searched.fit.crops)
    assert axes == ((1e-3, 3e-4, 1e-4), (1e-4, 0.0), (1, 3, 10), ("random", "inception"))
    assert (searched.fit.mixup, searched.fit.images_per_step, searched.fit.minival) == (0.1, 512, 0.02)
    flowers = load("fine_tune_experts.py:data_set=flowers,model=e3")
    minival = flowers.evaluations[0].data.portion
    assert (len(flowers.data.portion.sample_range(1020)), len(minival.sample_range(1020))) == (918, 102)
    experts = flowers.task.image_tower.encoder.experts
    assert (experts.capacity_factor, experts.eval_capacity_factor, experts.dropout_rate) == (1.5, 8.0, 0.1)


def test_vtab_has_the_tasks_of_its_suite_and_the_numbers_of_vit():
    """Dosovitskiy et al. 2021, Table 4 and App. B.1.1; crops and flips of scenic's configuration."""
    assert set(get_args(fine_tune_vtab.Task)) == set(fine_tune_vtab.RECIPES) == set(VTAB_1K.sets)
    config = load("fine_tune_vtab.py:task=clevr_count_all,size=h14")
    assert (config.data.batch_size, config.data.image_size, config.length) == (512, 384, Duration(2_500))
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm, config.optimizer.rule.momentum) == (
        0.0,
        1.0,
        0.9,
    )
    assert config.schedule == Schedule(0.01, warmup=Duration(200))
    assert config.data.preprocessing.fit == "squash"
    assert (config.data.crop, config.data.augmentations) == (None, (HorizontalFlip(),))
    crop = load("fine_tune_vtab.py:task=dsprites_label_orientation").data
    assert (round(384 / crop.crop.fraction), crop.augmentations) == (448, ())
    # The setting that ViT chose for all tasks is one of the grid.
    grid = experiment.load_grid(Path("configs/fine_tune_vtab.py:task=pets"))
    assert 2_500 in grid["length"]
    assert 0.01 in grid["schedule.learning-rate"]


def test_upstream_recipes_have_the_numbers_of_their_tables():
    """SoViT Table 7; HET-XL App. N.2."""
    names = ("so400m_sigmoid", "so400m_het_xl", "gigantic14_het_xl")
    sigmoid, both, gigantic = (load(f"lit_{name}.py") for name in names)
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


def test_recipes_on_trained_towers_have_the_numbers_of_public_code():
    """FLYP, dino.txt, and OpenCLIP's XLM-R."""
    flyp = load("flyp_imagenet.py")
    assert (flyp.data.batch_size, flyp.length) == (512, Duration(10, "epochs"))
    assert flyp.schedule == Schedule(1e-5, warmup=Duration(500))
    assert (flyp.optimizer.rule, flyp.optimizer.clip_norm, flyp.optimizer.layer_decay) == (AdamW(), None, 1.0)
    assert flyp.optimizer.weight_decay == pytest.approx(0.1 * 1e-5)
    assert classes_of(flyp.data.captions) == ("data/imagenet", "clip80")
    for model, patches in (("dinov2_l14", 256), ("dinov3_l16", 196)):
        dino = load(f"dino_txt.py:model={model}")
        tower, shapes = dino.task.image_tower, dino.task.build().shapes
        assert (tower.embedding_size, tower.num_patches, tower.top.mlp_width) == (2048, patches, 2752)
        locked, trainable = parameters.partition(shapes, dino.task.locked)
        assert set(trainable["image_tower"]) == {"top"}
        # ViT-L, without a head (Dosovitskiy et al. 2021, Table 1: 307 M).
        assert parameters.count(locked["image_tower"]) == pytest.approx(304e6, rel=0.005)
        assert dino.optimizer.weight_decay == pytest.approx(1e-4 * 7e-4)
    xlm_r = load("lit_xlm_r.py:size=base")
    # XLM-R base, most of it words (Conneau et al. 2020: 270 M), and a projection.
    assert parameters.count(xlm_r.task.build().shapes["text_tower"]) == pytest.approx(278e6, rel=0.005)
    assert RunLength.resolve(xlm_r.length, xlm_r.data.batch_size, None).num_steps == 13_000_000_000 // 90_112


def test_the_so400m_config_has_the_published_shapes_and_factors():
    config = load("lit_so400m_het_xl.py")
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
def test_the_so400m_tower_costs_the_published_floating_point_operations(image_size, gflop, monkeypatch):
    # XLA counts the body of a loop once, and large images attend a few heads at a time.
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", 2**40)
    published = load("lit_so400m_het_xl.py").task.image_tower

    def flops(depth) -> float:
        # The cost of a scan is counted once by XLA, so blocks are unrolled; float32 keeps conversions out of the count.
        encoder = dataclasses.replace(published.encoder, depth=depth, unrolled=True, compute_type="float32")
        tower = dataclasses.replace(published, encoder=encoder, image_size=image_size)
        task = ContrastiveTask(ContrastiveConfig(tower, TextConfig(embedding_size=1152)))
        image = jax.ShapeDtypeStruct((1, image_size, image_size, 3), np.uint8)
        cost = jax.jit(task.features).lower(task.shapes, image).cost_analysis()
        assert cost is not None
        return cost["flops"]

    # All blocks cost the same; it takes a second to trace each of 27.
    one, two = flops(1), flops(2)
    assert (one + (published.encoder.depth - 1) * (two - one)) / 1e9 == pytest.approx(gflop, rel=0.02)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_every_list_of_evaluations_survives_a_round_trip_through_json(path, tmp_path):
    saved(
        dataclasses.replace(load("quickstart_lit_het_xl.py"), evaluations=experiment.load_evaluations(path)), tmp_path
    )


def test_differences_name_the_dotted_field_and_both_values():
    config = load("quickstart_lit_het_xl.py")
    assert experiment.differences(config, dataclasses.replace(config, seed=7)) == {"seed": (0, 7)}


def read(content, folder) -> Any:
    """Returns the configuration of edited JSON."""
    (folder / "config.json").write_text(json.dumps(content))
    return experiment.load(folder / "config.json")


def test_a_saved_config_with_an_unknown_field_is_refused_by_name(tmp_path):
    content = experiment.to_dict(load("quickstart_lit_het_xl.py"))
    content["number_of_steps"] = content.pop("length")
    with pytest.raises(UserError, match="number_of_steps"):
        read(content, tmp_path)


def test_a_pattern_in_json_that_would_hang_is_refused_with_the_file(tmp_path):
    config = load("quickstart_lit_het_xl.py")
    for change in (
        {"task": dataclasses.replace(config.task, locked=("(.|.)*X",))},
        {"pretrained": experiment.PretrainedConfig(Path("run"), "(.|.)*X")},
        {"optimizer": dataclasses.replace(config.optimizer, groups=(ParameterGroup("(.|.)*X"),))},
    ):
        experiment.save(dataclasses.replace(config, **change), tmp_path / "config.json")
        with pytest.raises(UserError, match=r"config\.json: '\(\.\|\.\)\*X' cannot be used"):
            experiment.load(tmp_path / "config.json")


def test_a_run_of_before_punctuation_could_be_removed_keeps_it(tmp_path):
    content = experiment.to_dict(load("lit_so400m_het_xl.py"))
    del content["tokenizer"]["remove_punctuation"]
    tokenizer = read(content, tmp_path).tokenizer
    assert isinstance(tokenizer, SentencePieceConfig)
    assert not tokenizer.remove_punctuation


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_run_of_before_losses_were_objects_is_read(loss, tmp_path):
    content = experiment.to_dict(load("quickstart_upstream.py"))
    content["task"]["loss"] = loss
    found = read(content, tmp_path).task.loss
    assert isinstance(found, {"softmax": SoftmaxCrossEntropy, "sigmoid": SigmoidCrossEntropy}[loss])


def test_a_file_without_get_config_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"empty\.py has no get_config"):
        experiment.load_module_config(tmp_path / "empty.py")
