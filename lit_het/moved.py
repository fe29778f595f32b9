"""Modules that have moved: what files of users import under an old name is the module of the new one."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Without the name of this package; a package with all that is in it.
MOVED = {
    "apps.caption": "models.caption",
    "apps.classify": "models.classify",
    "apps.directions": "search.grid_runs",
    "apps.first_tower": "apps.new.first_tower",
    "apps.grid": "search.grid",
    "apps.grid_runs": "search.grid_runs",
    "apps.noise": "apps.add_noise",
    "apps.project": "apps.new.project",
    "apps.quickstart_evaluation": "apps.quickstart.evaluation",
    "apps.quickstart_report": "apps.quickstart.report",
    "apps.score_table": "files",
    "apps.search_space": "search.space",
    "apps.shape": "search.shape",
    "apps.temperatures": "search.temperatures",
    "apps.tuned_sets": "search.tuned_sets",
    "apps.tuning": "search.tuning",
    "apps.tuning_page": "search.tuning_page",
    "blocks": "losses.blocks",
    "cells": "files",
    "checkpoints": "weights",
    "checkpoints.weights": "weights.formats",
    "data_pipelines.augment": "data_pipelines.images.augment",
    "data_pipelines.captions": "data_pipelines.texts.captions",
    "data_pipelines.checksums": "data_pipelines.shards.checksums",
    "data_pipelines.corruptions": "data_pipelines.images.corruptions",
    "data_pipelines.faults": "data_pipelines.shards.faults",
    "data_pipelines.hashed": "data_pipelines.shards.hashed",
    "data_pipelines.image_headers": "data_pipelines.images.headers",
    "data_pipelines.image_repair": "data_pipelines.images.repair",
    "data_pipelines.index": "data_pipelines.shards.index",
    "data_pipelines.loader": "data_pipelines.shards.loader",
    "data_pipelines.memory": "data_pipelines.shards.memory",
    "data_pipelines.openai_clip": "data_pipelines.texts.openai_clip",
    "data_pipelines.order": "data_pipelines.shards.order",
    "data_pipelines.pipes": "data_pipelines.shards.pipes",
    "data_pipelines.portions": "data_pipelines.shards.portions",
    "data_pipelines.rand_augment": "data_pipelines.images.rand_augment",
    "data_pipelines.scan": "data_pipelines.shards.scan",
    "data_pipelines.seals": "data_pipelines.shards.seals",
    "data_pipelines.shuffling": "random",
    "data_pipelines.storage": "data_pipelines.shards.storage",
    "data_pipelines.stream": "data_pipelines.shards.stream",
    "data_pipelines.suspects": "data_pipelines.shards.suspects",
    "data_pipelines.tables": "data_pipelines.shards.tables",
    "data_pipelines.tars": "data_pipelines.shards.tars",
    "data_pipelines.tensorflow_text": "data_pipelines.texts.tensorflow_text",
    "data_pipelines.tokenizer_files": "data_pipelines.texts.tokenizer_files",
    "data_pipelines.tokenizers": "data_pipelines.texts.tokenizers",
    "data_pipelines.transforms": "data_pipelines.images.transforms",
    "data_pipelines.watchdog": "data_pipelines.shards.watchdog",
    "durations": "training.durations",
    "eval.ambiguity": "eval.metrics.ambiguity",
    "eval.answer_metrics": "eval.metrics.answers",
    "eval.benchmarks": "eval.sets.benchmarks",
    "eval.calibration": "eval.metrics.calibration",
    "eval.caption_metrics": "eval.metrics.captions",
    "eval.classes": "eval.metrics.classes",
    "eval.conformal": "eval.metrics.conformal",
    "eval.costs": "apps.uncertainty.measuring",
    "eval.diversity": "eval.metrics.diversity",
    "eval.ensembles": "eval.metrics.ensembles",
    "eval.few_shot_means": "eval.metrics.few_shot_means",
    "eval.gains": "eval.metrics.gains",
    "eval.multi_label": "eval.metrics.multi_label",
    "eval.open_sets": "eval.sets.open_sets",
    "eval.out_of_distribution": "eval.metrics.out_of_distribution",
    "eval.precision_at_r": "eval.metrics.precision_at_r",
    "eval.prompts": "eval.sets.prompts",
    "eval.published": "eval.sets.published",
    "eval.recognition": "eval.sets.recognition",
    "eval.retrieval": "eval.metrics.retrieval",
    "eval.rows": "eval.metrics.rows",
    "eval.scores": "eval.metrics.scores",
    "eval.selective": "eval.metrics.selective",
    "eval.significance": "eval.metrics.significance",
    "eval.text_scores": "eval.metrics.text_scores",
    "eval.uncertainty": "eval.metrics.uncertainty",
    "eval.vector_scaling": "eval.metrics.vector_scaling",
    "heads.deterministic": "heads.classification_config",
    "held_out": "tasks.held_out",
    "optimizers": "training.optimizers",
    "runs.alternatives": "configs.flags",
    "runs.averaging": "models.averaging",
    "runs.build": "training.build",
    "runs.calibration": "models.calibration.images",
    "runs.calibration_split": "models.calibration.split",
    "runs.caption_embedding": "apps.embed.captions",
    "runs.checks": "training.checks",
    "runs.directory": "training.directory",
    "runs.embedding": "apps.embed.images",
    "runs.evaluating": "training.evaluating",
    "runs.evaluation": "models.evaluation",
    "runs.experts": "models.experts",
    "runs.exporting": "weights.exporting",
    "runs.files": "training.files",
    "runs.fitting": "models.calibration.fitting",
    "runs.flags": "configs.flags",
    "runs.hyper_ensembles": "apps.hyper_ensembles",
    "runs.image_processors": "weights.huggingface.image_processors",
    "runs.importing": "weights.importing",
    "runs.initialization": "training.initialization",
    "runs.inspection": "weights.native.inspection",
    "runs.members": "training.members",
    "runs.model_card": "weights.cards",
    "runs.onnx_classify": "weights.onnx.classify",
    "runs.onnx_folder": "weights.onnx.folder",
    "runs.opening": "models.opening",
    "runs.parsing": "configs.parsing",
    "runs.plan": "planning.plan",
    "runs.plan_report": "planning.report",
    "runs.portable": "weights.portable",
    "runs.predictor": "models.predictor",
    "runs.pretrained": "models.pretrained",
    "runs.publishing": "weights.publishing",
    "runs.saved_calibration": "models.calibration.saved",
    "runs.sizes": "models.sizes",
    "runs.token_calibration": "models.calibration.tokens",
    "runs.tower_fingerprints": "models.tower_fingerprints",
    "runs.training": "training.train",
    "runs.writer": "models.writer",
    "schedules": "training.schedules",
    "shape_law": "search.law",
    "search.shape.running": "search.shape.sweeps",
    "stores": "data_pipelines.shards.stores",
    "tasks.captioner": "objectives.captioner",
    "tasks.distillation": "objectives.distillation",
    "tasks.masking": "objectives.masking",
    "tasks.mixing": "objectives.mixing",
    "tasks.mixup": "objectives.mixup",
    "tasks.views": "objectives.views",
    "tasks.noise_metrics": "tasks.two_towers",
    "training.metric_log": "training.log",
    "training.run_lock": "training.lock",
}
# Packages of which nothing is left under their names.
_GONE = ("lit_het.runs",)


def new_name(name: str) -> str | None:
    """Returns where a module is now; None if it has not moved."""
    package, _, rest = name.partition(".")
    parts = rest.split(".")
    for length in range(len(parts), 0, -1):
        if new := MOVED.get(".".join(parts[:length])):
            return ".".join([package, new, *parts[length:]])
    return None


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in _GONE:
            return ModuleSpec(fullname, None, is_package=True)
        if not fullname.startswith("lit_het.") or new_name(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        # Python returns what it finds under the name after this: the same module, not a second one.
        sys.modules[module.__name__] = importlib.import_module(str(new_name(module.__name__)))


def names_of(module: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` (PEP 562) of a package for the names of a module in it, which had its name before."""
    package = module.rpartition(".")[0]

    def find(name: str) -> Any:
        if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return find


def install() -> None:
    """Lets imports find what has moved, before others would load it again from the folder of a package that has."""
    sys.meta_path.insert(0, _Moved())
