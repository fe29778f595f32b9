"""The methods that the study compares, the settings that were tried for them, and the runs that each of them trains."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het.configs import quickstart_lit_deterministic
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.heads.contrastive_config import (
    ContrastiveHeadConfig,
    DeterministicContrastiveConfig,
    GaussianContrastiveConfig,
    HetXLContrastiveConfig,
    McDropoutContrastiveConfig,
    ProbVLMContrastiveConfig,
)
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.losses.contrastive import ContrastiveLoss, SigmoidLoss, SoftmaxLoss
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule

_COVARIANCE = CovarianceConfig(num_factors=4, form="full", initial_noise_norm=0.1)
_SIGMOID_BIAS = -10.0
_SOFTMAX = SoftmaxLoss(duplicates="negatives")  # that of the quickstart
_BOTH_TOWERS = "(image|text)_tower/.*"
# Peak learning rate of heads that are trained alone, as that of lit-het add-noise.
_LEARNING_RATE_ALONE = 3e-3


@dataclasses.dataclass(frozen=True)
class Method:
    """How a run of the study differs from the others.

    Attributes:
        head: the head; or the flags with which ``lit-het add-noise`` adds one to ``towers_of``.
        loss: the loss.
        towers_of: the method whose towers are locked, so that only the head and τ are trained; None for a text tower of
            its own.
        seed: added to that of the study, for members of an ensemble.
        title: the name in tables; empty for members of an ensemble.
    """

    head: ContrastiveHeadConfig | tuple[str, ...]
    loss: ContrastiveLoss = _SOFTMAX
    towers_of: str | None = None
    seed: int = 0
    title: str = ""


def _bayes_vlm(prediction: str, pseudo_data_count: int, setting: str = "") -> Method:
    flags = ("--task.head", "bayes_vlm", "--task.head.prediction", prediction)
    title = {"samples": "BayesVLM", "probit": "BayesVLM, probit"}[prediction] + setting
    flags = (*flags, "--task.head.pseudo-data-count", str(pseudo_data_count))
    return Method(flags, towers_of="deterministic", title=title)


METHODS: Mapping[str, Method] = {
    "deterministic": Method(DeterministicContrastiveConfig(), title="deterministic"),
    "deterministic_2": Method(DeterministicContrastiveConfig(), seed=1000),
    "deterministic_3": Method(DeterministicContrastiveConfig(), seed=2000),
    "het_xl": Method(HetXLContrastiveConfig(_COVARIANCE), title="HET-XL"),
    "het_xl_probit": Method(
        HetXLContrastiveConfig(_COVARIANCE, num_samples=0),
        SoftmaxLoss(duplicates="negatives", likelihood="pairwise_probit"),
        title="HET-XL, pairwise probit",
    ),
    "gaussian": Method(GaussianContrastiveConfig(initial_noise_norm=0.3), title="Gaussian"),
    "sigmoid_deterministic": Method(
        DeterministicContrastiveConfig(initial_bias=_SIGMOID_BIAS), SigmoidLoss(), title="deterministic, sigmoid"
    ),
    "sigmoid_het_xl": Method(
        HetXLContrastiveConfig(_COVARIANCE, initial_bias=_SIGMOID_BIAS), SigmoidLoss(), title="HET-XL, sigmoid"
    ),
    "sigmoid_gaussian": Method(
        GaussianContrastiveConfig(initial_bias=_SIGMOID_BIAS), SigmoidLoss(), title="Gaussian, sigmoid (ProLIP)"
    ),
    "sigmoid_pseudo_positives": Method(
        GaussianContrastiveConfig(initial_noise_norm=0.3, inclusion=0.0, initial_bias=_SIGMOID_BIAS),
        SigmoidLoss(pseudo_positives=0.1),
        title="Gaussian, sigmoid, pseudo-positives (PCME++)",
    ),
    "het_xl_alone": Method(HetXLContrastiveConfig(_COVARIANCE), towers_of="deterministic", title="HET-XL, head alone"),
    "prob_vlm": Method(ProbVLMContrastiveConfig(), towers_of="deterministic", title="ProbVLM"),
    "mc_dropout": Method(McDropoutContrastiveConfig(dropout=0.03), towers_of="deterministic", title="MC dropout"),
    "het_xl_added": Method((), towers_of="deterministic", title="HET-XL, lit-het add-noise"),
    "bayes_vlm": _bayes_vlm("samples", 100),
    "bayes_vlm_probit": _bayes_vlm("probit", 1000),
}


def _like(name: str, setting: str, **fields: Any) -> Method:
    """Returns a method with other fields of its head; the setting is told by its title."""
    method = METHODS[name]
    assert not isinstance(method.head, tuple)
    head = dataclasses.replace(method.head, **fields)
    return dataclasses.replace(method, head=head, title=f"{method.title}, {setting}")


# The settings that those above were chosen among: by the NLL, as trained, of a validation typeface, where .005 or more
# was gained over the papers'. HET-XL with a text tower of its own has the settings that the study of noise chose.
CANDIDATES: Mapping[str, Method] = {
    **{
        f"het_xl_alone_{norm}": _like(
            "het_xl_alone",
            f"initial noise norm {norm}",
            covariance=dataclasses.replace(_COVARIANCE, initial_noise_norm=norm),
        )
        for norm in (0.03, 0.3)
    },
    **{
        f"{name}_{norm}": _like(name, f"initial noise norm {norm}", initial_noise_norm=norm)
        for name, norms in {
            "prob_vlm": (0.1, 0.3),
            "gaussian": (0.1, 1.0),
            "sigmoid_gaussian": (0.3, 1.0),
            "sigmoid_pseudo_positives": (0.1, 1.0),
        }.items()
        for norm in norms
    },
    **{f"mc_dropout_{share}": _like("mc_dropout", f"dropout {share}", dropout=share) for share in (0.01, 0.1, 0.3)},
    **{
        f"{name}_{count}": _bayes_vlm(prediction, count, f", pseudo-data count {count}")
        for name, prediction, counts in (
            ("bayes_vlm", "samples", (1, 10, 1000)),
            ("bayes_vlm_probit", "probit", (1, 10, 100)),
        )
        for count in counts
    },
}
ALL: Mapping[str, Method] = {**METHODS, **CANDIDATES}

FIRST = METHODS["deterministic"].title  # that the others are compared with
ENSEMBLE = ("deterministic", "deterministic_2", "deterministic_3")


def configuration(name: str, root: Path, condition: str, captions: str, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a method.

    Args:
        name: of the method.
        root: folder of the data, the upstream run and the embeddings of this seed.
        condition: folder of the runs on the same captions.
        captions: the member of the training pairs.
        seed: of the study.
        steps: updates of a run.
    """
    method, base = ALL[name], quickstart_lit_deterministic.get_config(root)
    assert not isinstance(method.head, tuple), "lit-het add-noise has a configuration of its own"
    task = dataclasses.replace(base.task, head=method.head, loss=method.loss)
    number = seed + method.seed
    config = dataclasses.replace(
        base,
        run_dir=root / condition / name,
        task=task,
        data=dataclasses.replace(base.data, captions=captions, embeddings=str(root / "embeddings"), seed=number),
        length=Duration(steps),
        seed=number,
    )
    if method.towers_of is None:
        return config
    return dataclasses.replace(
        config,
        task=dataclasses.replace(task, locked=(_BOTH_TOWERS,)),
        pretrained=PretrainedConfig(run=root / condition / method.towers_of, pattern=_BOTH_TOWERS),
        schedule=Schedule(learning_rate=_LEARNING_RATE_ALONE, warmup=Duration(5, "percent")),
    )
