"""Models of e3's Tables 2 to 5 and 12 at the size of the glyph data, and how each starts from an upstream model.

Left out are those that take most time or differ least: MIMO with a repeated batch, M = 4 of MIMO and BatchEnsemble,
more K of multi-pred and e3, tiling with more noise, initial noise on experts, hyper-ensembles. BatchEnsemble's vectors
start as e3's do, N(1, 0.5).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lit_het.configs import glyph_classifier
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig, RankOneConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.studies import harness

# Capacities, dropout and "last-2" are the paper's (Table 7).
VMOE = ExpertsConfig(num_experts=8, num_selected=2, num_blocks=2, dropout_rate=0.1, capacity_factor=1.5)
TOWER = ViTConfig(
    image_size=32,
    # A single patch, as in `glyph_classifier`: experts are chosen by images. Steps with four patches take twice as long
    # and lead to about the same error on a validation typeface (docs/results/ensembles.json).
    patch_size=32,
    encoder=EncoderConfig(width=96, depth=4, mlp_width=384, num_heads=4, unrolled=True),
    pooling="mean",
    positions="sine_cosine",
    members="apart",
)
CADENCE = Cadence(log_steps=100, save_steps=10_000)
UPSTREAM: Mapping[str, ExpertsConfig | None] = {"vit": None, "vmoe": VMOE}


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train a downstream model, or to use one that is trained.

    Attributes:
        title: its name in tables.
        source: the upstream model that it starts from.
        experts: changes of the experts of that model, or other ones.
        task: changes of the task.
        num_inputs: of the tower (MIMO).
        runs: of a deep ensemble, the methods whose runs are its members.
        used_with: fields of the experts in evaluation alone.
        samples: noise samples in evaluation.
    """

    title: str
    source: Literal["vit", "vmoe"] = "vmoe"
    experts: Mapping[str, Any] | ExpertsConfig = dataclasses.field(default_factory=dict)
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_inputs: int = 1
    runs: tuple[str, ...] = ()
    used_with: tuple[str, ...] = ()
    samples: int = 0

    @property
    def tower(self) -> ViTConfig:
        """The image tower."""
        experts = UPSTREAM[self.source]
        if isinstance(self.experts, ExpertsConfig):
            experts = self.experts
        elif experts is not None:
            experts = dataclasses.replace(experts, **self.experts)
        encoder = dataclasses.replace(TOWER.encoder, experts=experts)
        return dataclasses.replace(TOWER, encoder=encoder, num_inputs=self.num_inputs)


def _e3(k: int, m: int, **changes: Any) -> dict[str, Any]:
    return {"num_selected": k, "num_members": m, **changes}


# Its kernel is random at first and its temperature learned; the heads of the other methods start from zero, with τ = 1.
_HET = {"head": glyph_classifier.HEAD}
METHODS: Mapping[str, Method] = {
    "vit": Method("ViT", "vit"),
    "vit_2": Method("", "vit"),
    "vit_ensemble": Method("ViT, 2 runs", "vit", runs=("vit", "vit_2")),
    "batch_ensemble": Method(
        "BatchEnsemble ViT, M = 2",
        "vit",
        ExpertsConfig(2, 1, num_blocks=2, num_members=2, rank_one=RankOneConfig("normal")),
    ),
    "vmoe_1": Method("V-MoE, K = 1", experts={"num_selected": 1}),
    "vmoe_1_2": Method("", experts={"num_selected": 1}),
    "vmoe_ensemble": Method("V-MoE, K = 1, 2 runs", runs=("vmoe_1", "vmoe_1_2")),
    "vmoe_upstream": Method("V-MoE, K = 1, 2 upstream runs", runs=("vmoe_1", "vmoe_1/next")),
    "vmoe_2": Method("V-MoE, K = 2"),
    "vmoe_4": Method("V-MoE, K = 4", experts={"num_selected": 4}),
    "e3_1_2": Method("e3, K = 1, M = 2", experts=_e3(1, 2)),
    "e3_2_2": Method("e3, K = 2, M = 2", experts=_e3(2, 2)),
    "e3_1_4": Method("e3, K = 1, M = 4", experts=_e3(1, 4)),
    "partitioning": Method("partitioning, K = 2, M = 2", experts=_e3(2, 2, tiled=False)),
    "tiling": Method("tiling, K = 2, M = 2", experts=_e3(2, 2, overlap=8)),
    "overlap_4": Method("overlap 4, K = 2, M = 2", experts=_e3(2, 2, overlap=4)),
    "multi_pred": Method("multi-pred, K = 2", experts={"multi_pred": True}),
    "heads": Method("2 heads, K = 2", task={"num_heads": 2}),
    "mc_dropout": Method("Monte Carlo dropout, K = 2, 4 samples", runs=("vmoe_2",), used_with=("dropout_samples=4",)),
    "mimo": Method("MIMO, K = 2, M = 2", task={"num_heads": 2, "mimo": MimoConfig()}, num_inputs=2),
    "joint": Method("e3, K = 1, M = 2, loss of the mean", experts=_e3(1, 2), task={"member_loss": "joint"}),
    "permuted": Method("e3, K = 1, M = 2, experts permuted", experts=_e3(1, 2, permutation=1)),
    "vmoe_het": Method("V-MoE, K = 2, HET-XL", task=_HET, samples=100),
    "e3_het": Method("e3, K = 1, M = 2, HET-XL", experts=_e3(1, 2), task=_HET, samples=100),
}


ORDERINGS = (
    ("Table 2", "e3_2_2", "vmoe_4", 0.612 - 0.636),
    ("Table 2", "e3_2_2", "tiling", 0.612 - 0.637),
    ("Table 2", "e3_2_2", "partitioning", 0.612 - 0.640),
    ("Table 3, half of the experts", "e3_2_2", "overlap_4", 0.612 - 0.639),
    ("Table 4", "e3_1_2", "multi_pred", 0.622 - 0.636),
    ("Table 4", "multi_pred", "vmoe_2", 0.636 - 0.638),
    ("Table 5", "vmoe_2", "vit", 0.638 - 0.688),
    ("Table 5", "batch_ensemble", "vit", 0.682 - 0.688),
    ("Table 5", "e3_1_2", "batch_ensemble", 0.622 - 0.682),
    ("Table 5", "e3_1_2", "vmoe_2", 0.622 - 0.638),
    ("Table 5", "e3_1_2", "mimo", 0.622 - 0.636),
    ("Table 12", "e3_1_2", "mc_dropout", 0.622 - 0.634),
    ("Table 12", "vmoe_2", "vmoe_1", 0.638 - 0.642),
    ("Table 12", "e3_2_2", "e3_1_2", 0.612 - 0.622),
    ("Table 12", "e3_1_4", "e3_1_2", 0.624 - 0.622),
)
"""Pairs of methods that the paper compares: the table, both methods, and the printed difference of NLL."""


def upstream(source: str, data: Path, run_dir: Path, seed: int) -> ExperimentConfig:
    """Returns the training of a tower on the words of names, several of each image."""
    base = harness.upstream(run_dir, data, seed)
    assert isinstance(base.task, ClassificationConfig)
    task = ClassificationConfig(
        image_tower=Method("", source).tower,  # pyright: ignore[reportArgumentType]
        head=DeterministicConfig(initial_bias=-5.0),
        num_classes=base.task.num_classes,
        loss=SigmoidCrossEntropy(),
    )
    return harness.run_of(base, run_dir, data, seed, steps=2000, task=task, cadence=CADENCE)


def downstream(
    name: str, data: Path, upstream_run: Path, run_dir: Path, seed: int, steps: int, learning_rate: float
) -> ExperimentConfig:
    """Returns the training of a method's classifier of names, from an upstream run."""
    method, base = METHODS[name], glyph_classifier.get_config(head=DeterministicConfig(zero_kernel=name != "heads"))
    assert isinstance(base.task, ClassificationConfig)
    return harness.run_of(
        base,
        run_dir,
        data,
        seed,
        steps=steps,
        task=dataclasses.replace(base.task, image_tower=method.tower, **method.task),
        pretrained=PretrainedConfig(upstream_run),
        schedule=Schedule(learning_rate=learning_rate, warmup=Duration(50)),
        cadence=CADENCE,
    )
