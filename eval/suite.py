"""All that a model can be evaluated on."""

from typing import TypeAlias

from eval.zero_shot import ZeroShotConfig

EvaluationConfig: TypeAlias = ZeroShotConfig

# By the names of the commands.
EVALUATIONS: dict[str, type[EvaluationConfig]] = {"zero-shot": ZeroShotConfig}
