"""What ``lit-het plan`` gives for the models of e3, beside what the paper prints."""

from pathlib import Path

import jax
import pytest

from lit_het.planning import costs
from lit_het.runs.parsing import parse_config
from lit_het.runs.plan import Step
from lit_het.towers.dispatch import DISPATCH

EXPERTS = "task.image-tower.encoder.experts"
SIZES = ("s32", "b32", "b16", "l32", "l16", "h14")
# Table 20: GFLOP of downstream training. Tables 5 and 12 repeat those of B/32.
GFLOP = {
    ("vit", None, 1): (24.01, 77.97, 334.48, 271.83, 1151.71, 3033.60),
    ("vmoe", 1, 1): (26.02, 82.35, 351.91, 279.55, 1182.08, 3179.90),
    ("vmoe", 2, 1): (31.66, 94.93, 401.98, 301.75, 1270.78, 3617.94),
    ("vmoe", 4, 1): (42.95, 120.11, 501.99, 346.25, 1448.06),
    ("vmoe", 8, 1): (65.59, 170.44, None, 435.26),
    ("e3", 1, 2): (36.69, 105.89, 452.62, 320.92, 1356.46, 4183.28),
    ("e3", 2, 2): (47.98, 131.06, 552.65, 365.42, 1533.74),
    ("e3", 4, 2): (70.61, 181.40, None, 454.43),
    ("e3", 1, 4): (58.03, 152.98, None, 403.77),
    ("e3", 2, 4): (80.66, 203.31, None, 492.77),
}
ROWS = [
    (*row, size, printed)
    for row, figures in GFLOP.items()
    for size, printed in zip(SIZES, figures, strict=False)
    if printed is not None
]


def step(model, size, flags=()) -> Step:
    """The step of ``lit-het plan --config fine_tune_experts:model=MODEL,size=SIZE --devices 1 FLAGS``."""
    path = Path(f"configs/fine_tune_experts.py:model={model},size={size}")
    config = parse_config(path, flags, "lit-het plan")
    return Step(config, config.mesh.build(jax.devices()[:1]))


def gflop(model, k, m, size="b32", flags=()) -> tuple[float, float]:
    """GFLOP of an image without one-hot dispatch, and those of the dispatch."""
    if k is not None:
        flags = [*flags, f"--{EXPERTS}.num-selected", str(k), f"--{EXPERTS}.num-members", str(m)]
    this = step(model, size, flags)
    flops, dispatch = (count / this.config.data.batch_size / 1e9 for count in this.flops())
    return flops - dispatch, dispatch


@pytest.mark.parametrize(("model", "k", "m", "size", "printed"), ROWS)
def test_operations_without_dispatch_are_those_that_e3_prints(model, k, m, size, printed):
    assert gflop(model, k, m, size)[0] == pytest.approx(printed, rel=0.012)


# Table 12, beside the models of Table 20.
@pytest.mark.parametrize(
    ("model", "flags", "printed"),
    [
        ("batch_ensemble", {}, 97.1),
        ("batch_ensemble", {f"{EXPERTS}.num-experts": 4, f"{EXPERTS}.num-members": 4}, 135.4),
        ("mimo", {}, 96.3),
        ("mimo", {"task.image-tower.num-inputs": 4, "task.num-heads": 4}, 99.0),
        ("mimo", {"task.mimo.batch-repetitions": 2}, 192.6),
        ("mimo", {"task.mimo.batch-repetitions": 2, "task.image-tower.num-inputs": 4, "task.num-heads": 4}, 198.1),
    ],
)
def test_operations_of_other_efficient_ensembles_are_those_that_e3_prints(model, flags, printed):
    found, _ = gflop(model, None, None, flags=[x for flag, value in flags.items() for x in (f"--{flag}", str(value))])
    assert found == pytest.approx(printed, rel=0.02)


# The same for Monte Carlo dropout, which samples in prediction: three times its operations, at a capacity of 1.
@pytest.mark.parametrize(
    ("k", "m", "printed"), [(1, 2, 97.2), (1, 4, 135.6), (2, 2, 113.7), (2, 4, 168.6), (4, 2, 146.7)]
)
def test_operations_of_monte_carlo_dropout_are_those_that_e3_prints(k, m, printed):
    flags = {"num-selected": k, "dropout-samples": m, "eval-capacity-factor": 1.0}
    this = step("mc_dropout", "b32", [x for flag, value in flags.items() for x in (f"--{EXPERTS}.{flag}", str(value))])
    task, images = this.config.task.build(), jax.ShapeDtypeStruct((32, 384, 384, 3), "uint8")
    everything, dispatch = (costs.product_flops(task.features, task.shapes, images, scope=x) for x in ("", DISPATCH))
    assert 3 * (everything - dispatch) / 32 / 1e9 == pytest.approx(printed, rel=0.05)


# Table 22: its ablations have another routing, which costs more. The figures are those of Table 20 with the dispatch
# over groups of two images, of all members together, so that ours takes as many tokens of each member.
@pytest.mark.parametrize(
    ("model", "k", "m", "flags", "printed"),
    [
        ("vmoe", 2, 1, {}, 96.895),
        ("vmoe", 4, 1, {}, 123.644),
        ("vmoe", 8, 1, {}, 178.133),
        ("e3", 1, 2, {}, 109.781),
        ("e3", 2, 2, {}, 138.457),
        ("e3", 4, 2, {}, 196.870),
        ("tiling", 2, 2, {}, 138.460),
        ("overlap", 2, 2, {"overlap": 2}, 138.457),
        ("overlap", 2, 2, {"overlap": 4}, 138.458),
        ("overlap", 2, 2, {"overlap": 8}, 138.459),
        ("overlap", 2, 2, {"overlap": 16}, 138.460),
        # The table's K of partitioning counts the experts of a token over all members.
        ("partitioning", 1, 2, {}, 97.885),
    ],
)
def test_operations_with_dispatch_are_those_of_the_ablations_of_e3(model, k, m, flags, printed):
    flags = {"tokens-per-group": m * 2 * 145, **flags}
    as_text = [x for flag, value in flags.items() for x in (f"--{EXPERTS}.{flag}", str(value))]
    assert sum(gflop(model, k, m, flags=as_text)) == pytest.approx(printed, rel=0.05)


# Also of Table 22, but without dispatch: its way back of several predictions takes less than ours, a product for each.
@pytest.mark.parametrize(("k", "printed"), [(2, 96.330), (4, 122.526), (8, 175.889)])
def test_operations_of_several_predictions_are_those_that_e3_prints(k, printed):
    assert gflop("multi_pred", k, 1)[0] == pytest.approx(printed, rel=0.05)


# Table 23: millions of parameters upstream, with JFT's 18,291 classes and a pre-logits layer, at 224 px.
@pytest.mark.parametrize(
    ("size", "dense", "sparse"),
    [
        ("s32", "36.5", "166.7"),
        ("b32", "102.1", "395.0"),
        ("b16", "100.5", "393.3"),
        ("l32", "325.3", "845.8"),
        ("l16", "323.1", "843.6"),
        ("h14", "655.8", "2688.6"),
    ],
)
def test_parameters_are_those_that_e3_prints(size, dense, sparse):
    width = step("vit", size).config.task.image_tower.embedding_size
    flags = {"image-tower.image-size": 224, "image-tower.representation-size": width, "num-classes": 18_291}
    for model, printed in (("vit", dense), ("vmoe", sparse)):
        parts = step(model, size, [text for flag, value in flags.items() for text in (f"--task.{flag}", str(value))])
        assert f"{sum(map(sum, parts.counts().values())) / 1e6:.1f}" == printed
