"""All evaluations, by the name of their command."""

from typing import TypeAlias

from lit_het.eval.evaluators.ensemble import EnsembleConfig
from lit_het.eval.evaluators.frozen import FewShotConfig, LinearProbeConfig
from lit_het.eval.evaluators.out_of_distribution import OutOfDistributionConfig
from lit_het.eval.evaluators.retrieval import RetrievalConfig
from lit_het.eval.evaluators.shift import ShiftConfig
from lit_het.eval.evaluators.zero_shot import ZeroShotConfig

EvaluationConfig: TypeAlias = (
    ZeroShotConfig
    | RetrievalConfig
    | FewShotConfig
    | LinearProbeConfig
    | ShiftConfig
    | OutOfDistributionConfig
    | EnsembleConfig
)

EVALUATIONS: dict[str, type[EvaluationConfig]] = {
    "zero-shot": ZeroShotConfig,
    "retrieval": RetrievalConfig,
    "few-shot": FewShotConfig,
    "linear-probe": LinearProbeConfig,
    "shift": ShiftConfig,
    "out-of-distribution": OutOfDistributionConfig,
    "ensemble": EnsembleConfig,
}
