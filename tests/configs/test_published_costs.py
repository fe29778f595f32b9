"""What ``lit-het plan`` gives for the models of e3, beside what the paper prints."""

from pathlib import Path
from typing import Any

import jax
import pytest

from lit_het.configs.parsing import parse_config
from lit_het.planning import costs
from lit_het.planning.plan import Step
from lit_het.towers.dispatch import DISPATCH

EXPERTS = "task.image-tower.encoder.experts"
SIZES = ("s32", "b32", "b16", "l32", "l16", "h14")


def experts(k, m, **others) -> dict[str, Any]:
    """The flags of K experts of a token and M members."""
    fields = {"num_selected": k, "num_members": m, **others}
    return {f"{EXPERTS}.{name.replace('_', '-')}": value for name, value in fields.items()}


INPUTS, REPETITIONS = {"task.image-tower.num-inputs": 4, "task.num-heads": 4}, {"task.mimo.batch-repetitions": 2}
ROWS = [
    # Table 20, downstream training. Every size without experts; the smallest and the largest K, M and size with them:
    # each row takes a second of tracing, costs are linear in K and M, and sizes know nothing of them.
    *(
        ("vit", {}, size, printed, 0.012)
        for size, printed in zip(SIZES, (24.01, 77.97, 334.48, 271.83, 1151.71, 3033.60), strict=True)
    ),
    ("vmoe", experts(1, 1), "b32", 82.35, 0.012),
    ("vmoe", experts(8, 1), "b32", 170.44, 0.012),
    ("e3", experts(1, 2), "b32", 105.89, 0.012),
    ("e3", experts(1, 2), "h14", 4183.28, 0.012),
    ("e3", experts(2, 4), "b32", 203.31, 0.012),
    # Table 12, beside the models of Table 20.
    ("batch_ensemble", {}, "b32", 97.1, 0.02),
    ("batch_ensemble", {f"{EXPERTS}.num-experts": 4, f"{EXPERTS}.num-members": 4}, "b32", 135.4, 0.02),
    ("mimo", {}, "b32", 96.3, 0.02),
    ("mimo", REPETITIONS | INPUTS, "b32", 198.1, 0.02),
    # Of Table 22, but without dispatch: its way back of several predictions takes less than ours, a product for each.
    ("multi_pred", experts(8, 1), "b32", 175.889, 0.05),
]


def step(model, size, flags) -> Step:
    """The step of ``lit-het plan --config fine_tune_experts:model=MODEL,size=SIZE --devices 1 FLAGS``."""
    path = Path(f"configs/fine_tune_experts.py:model={model},size={size}")
    texts = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    config = parse_config(path, texts, "lit-het plan")
    return Step(config, config.mesh.build(jax.devices()[:1]))


def gflop(model, flags, size) -> tuple[float, float]:
    """GFLOP of an image without one-hot dispatch, and those of the dispatch."""
    this = step(model, size, flags)
    flops, dispatch = (count / this.config.data.batch_size / 1e9 for count in this.flops())
    return flops - dispatch, dispatch


def one_of_a_kind(rows):
    """Marks as slow all rows but the first of B/32 of some models: each is a second of tracing."""
    short = [next(row for row in rows if row[0] == model and "b32" in row) for model in ("vmoe", "e3", "mimo")]
    return [pytest.param(*row, marks=() if row in short else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("model", "flags", "size", "printed", "tolerance"), one_of_a_kind(ROWS))
def test_operations_without_dispatch_are_those_that_e3_prints(model, flags, size, printed, tolerance):
    assert gflop(model, flags, size)[0] == pytest.approx(printed, rel=tolerance)


# Table 12, for Monte Carlo dropout, which samples in prediction: three times its operations, at a capacity of 1.
@pytest.mark.slow
@pytest.mark.parametrize(("k", "m", "printed"), [(1, 2, 97.2), (2, 4, 168.6)])
def test_operations_of_monte_carlo_dropout_are_those_that_e3_prints(k, m, printed):
    flags = {"num-selected": k, "dropout-samples": m, "eval-capacity-factor": 1.0}
    this = step("mc_dropout", "b32", {f"{EXPERTS}.{flag}": value for flag, value in flags.items()})
    task, images = this.config.task.build(), jax.ShapeDtypeStruct((32, 384, 384, 3), "uint8")
    everything, dispatch = (costs.product_flops(task.features, task.shapes, images, scope=x) for x in ("", DISPATCH))
    assert 3 * (everything - dispatch) / 32 / 1e9 == pytest.approx(printed, rel=0.05)


# Table 22: its ablations have another routing, which costs more. The figures are those of Table 20 with the dispatch
# over groups of two images, of all members together, so that ours takes as many tokens of each member.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "k", "m", "flags", "printed"),
    [
        ("vmoe", 8, 1, {}, 178.133),
        ("e3", 4, 2, {}, 196.870),
        ("tiling", 2, 2, {}, 138.460),
        ("overlap", 2, 2, {"overlap": 2}, 138.457),
        # The table's K of partitioning counts the experts of a token over all members.
        ("partitioning", 1, 2, {}, 97.885),
    ],
)
def test_operations_with_dispatch_are_those_of_the_ablations_of_e3(model, k, m, flags, printed):
    assert sum(gflop(model, experts(k, m, tokens_per_group=m * 2 * 145, **flags), "b32")) == pytest.approx(
        printed, rel=0.05
    )


# Table 23: millions of parameters upstream, with JFT's 18,291 classes and a pre-logits layer, at 224 px.
@pytest.mark.parametrize(
    ("size", "dense", "sparse"),
    [
        ("b32", "102.1", "395.0"),
        ("h14", "655.8", "2688.6"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("s32", "36.5", "166.7"),
                ("b16", "100.5", "393.3"),
                ("l32", "325.3", "845.8"),
                ("l16", "323.1", "843.6"),
            )
        ),
    ],
)
def test_parameters_are_those_that_e3_prints(size, dense, sparse):
    width = step("vit", size, {}).config.task.require_image_tower().embedding_size
    flags = {"image-tower.image-size": 224, "image-tower.representation-size": width, "num-classes": 18_291}
    flags = {f"task.{flag}": value for flag, value in flags.items()}
    for model, printed in (("vit", dense), ("vmoe", sparse)):
        assert f"{sum(map(sum, step(model, size, flags).counts().values())) / 1e6:.1f}" == printed
