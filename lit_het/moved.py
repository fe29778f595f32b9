"""Modules and names that have moved: files of users find them under their old names, or are told the new ones."""

import functools
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Without the name of this package; a package with all that is in it.
MOVED = {
    "api.candidates": "models.candidates",
    "api.drawing": "models.drawing",
    "api.images": "models.images",
    "api.model": "models.model",
    "api.results": "models.results",
    "api.work": "api",
    "api.writing": "models.writing",
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
    "eval.prompts": "data_pipelines.texts.prompts",
    "eval.published": "eval.sets.published",
    "eval.recognition": "eval.sets.recognition",
    "eval.retrieval": "eval.metrics.retrieval",
    "eval.rows": "eval.metrics.rows",
    "eval.scores": "eval.metrics.scores",
    "eval.selective": "eval.metrics.selective",
    "eval.sets.prompts": "data_pipelines.texts.prompts",
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
    "search.shape.running": "search.shape.sweeps",
    "shape_law": "search.law",
    "stores": "data_pipelines.shards.stores",
    "tasks.captioner": "objectives.captioner",
    "tasks.captioning_task": "tasks.writing",
    "tasks.distillation": "objectives.distillation",
    "tasks.every_task": "tasks.base",
    "tasks.masking": "objectives.masking",
    "tasks.mixing": "objectives.mixing",
    "tasks.mixup": "objectives.mixup",
    "tasks.noise_metrics": "heads.base",
    "tasks.translator": "tasks.writing",
    "tasks.views": "objectives.views",
    "training.metric_log": "training.log",
    "training.run_lock": "training.lock",
    "weights.weights": "weights.formats",  # checkpoints.weights
}

# Modules, by their present names, some of whose names are in another one now: they are found in both.
SPLIT = {
    "apps.quickstart": "apps.quickstart.running",
    "data_pipelines.images": "data_pipelines.images.decoding",
    "data_pipelines.labels": "data_pipelines.labels_config",
    "data_pipelines.shards": "data_pipelines.shards.writing",
    "data_pipelines.shards.portions": "data_pipelines.shards.writing",
    "data_pipelines.shards.storage": "data_pipelines.shards.urls",
    "data_pipelines.texts.tensorflow_text": "data_pipelines.texts.tokenizers_config",
    "data_pipelines.texts.tokenizers": "data_pipelines.texts.tokenizers_config",
    "eval.metrics.answers": "eval.decoder_suite",
    "eval.sets": "eval.sets.folders",
    "heads.sampling": "heads.noise_config",
    "heads.temperature": "heads.temperature_config",
    "losses.classification": "losses.classification_config",
    "losses.contrastive.loss": "losses.contrastive.loss_config",
    "models.calibration.fitting": "heads.bayes_vlm_fit",
    "models.opening": "training.directory",
    "objectives.captioner": "objectives.tokens",
    "tasks.classification": "tasks.classifier",
    "tasks.contrastive": "tasks.two_towers",
    "tasks.temperature_gradient": "tasks.temperature_gradient_config",
    "towers.transformer": "towers.encoder_config",
    "training.evaluating": "training.train",
}

# Names of what is another thing now, with other arguments: their import says which.
RENAMED = {
    "apps.benchmark.results.write_text": "files.write_atomically",
    "configs.flags.chosen": "configs.flags.with_flags",
    "data_pipelines.texts.tensorflow_text.silenced_stderr": "data_pipelines.texts.tokenizer_files.silenced_stderr",
    "files.write_table": "files.write_columns",
    "heads.base.noise_metrics": "heads.base.ContrastiveHead.noise_metrics",
    "heads.classification_config.DeterministicClassifier": "heads.base.ClassificationHead",
    "heads.contrastive.DeterministicContrastive": "heads.base.ContrastiveHead",
    "heads.contrastive.key_logits": "heads.base.ContrastiveHead.logits",
    "heads.gaussian.variances_of_texts": "heads.contrastive_config.GaussianContrastiveConfig.text_variances",
    "objectives.captioner.Captioner": "objectives.captioner.CaptionerConfig.modules",
    "objectives.captioner.check_tied": "towers.decoder_config.DecoderConfig.check_head",
    "objectives.distillation.Distillation": "objectives.distillation.DistillationConfig.modules",
    "search.grid.check": "search.grid_runs.check_folder",
    "search.grid_runs.GivenUp": "search.grid_runs.Pruned",
    "search.space.is_hopeless": "search.space.should_prune",
    "tasks.base.DistillingTask": "objectives.base.Objective",
    "tasks.base.layers_above_towers": "tasks.base.Task.layers_above",
    "tasks.base.trained_parts": "parameters.partition",
    "tasks.captioning.CaptioningTask": "tasks.writing.WritingTask",
    "tasks.captioning.ImageCaptioner": "tasks.writing.EncoderDecoder",
    "tasks.captioning.captioning_of": "tasks.contrastive.ContrastiveConfig.decoder_beside",
    "tasks.patch_sizes.losses": "tasks.patch_sizes.at_patch_sizes",
    "tasks.translation.TranslationTask": "tasks.writing.WritingTask",
    "tasks.translation.Translator": "tasks.writing.EncoderDecoder",
    "tasks.union.AnyTask": "tasks.base.Task",
    "tasks.union.compute_type_of": "tasks.options.TaskOptions.compute_type",
    "training.checks.check_data": "tasks.options.TaskOptions.check_data",
    "training.checks.unseen_pixels": "towers.base.ImageTowerOptions.unseen_pixels",
    "training.step.make_train_step": "training.step.make_step",
    "training.train.distilled_from": "tasks.base.Task.late_parts",
}

_REPORTS = {
    "comparison": "ComparedFigure Comparison compare comparison_table",
    "figures": "Chart curves distribution reliability_diagrams",
    "grids": "image_strip image_to_name_grid mark_legend",
    "page": "Html Section configuration facts paragraph render_page side_by_side",
    "statements": "describe_comparison describe_group_errors describe_rank_test",
}
# The package, which would have to import all of them.
RENAMED |= {f"eval.report.{name}": f"eval.report.{part}.{name}" for part in _REPORTS for name in _REPORTS[part].split()}

# Packages of which nothing is left under their names.
_GONE = ("lit_het.runs",)
_HAVE_OLD_NAMES = {*SPLIT, *(name.rpartition(".")[0] for name in RENAMED)}


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
        if not fullname.startswith("lit_het."):
            return None
        if new_name(fullname):
            return ModuleSpec(fullname, self)
        if fullname.removeprefix("lit_het.") not in _HAVE_OLD_NAMES:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithOldNames(spec.loader)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # Python returns what it finds under the name after this: the same module, not a second one.
        sys.modules[module.__name__] = importlib.import_module(str(new_name(module.__name__)))


class _WithOldNames(Loader):
    def __init__(self, loader: Loader):
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader  # as importlib.util.LazyLoader does
        # Before the module runs, whose own function of this name (PEP 562) replaces it.
        vars(module)["__getattr__"] = functools.partial(_elsewhere, module.__name__)
        self._loader.exec_module(module)


def _elsewhere(module: str, name: str) -> Any:
    package, _, old = module.partition(".")
    if new := RENAMED.get(f"{old}.{name}"):
        raise ImportError(f"{module}.{name} is now {package}.{new}")
    # Python asks a package for its modules, too, before it imports them.
    folders = vars(sys.modules[module]).get("__path__")
    is_module = folders is not None and PathFinder.find_spec(f"{module}.{name}", folders) is not None
    if not name.startswith("_") and old in SPLIT and not is_module:
        found = getattr(importlib.import_module(f"{package}.{SPLIT[old]}"), name, None)
        if found is not None and not isinstance(found, ModuleType):
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    """Lets imports find what has moved, before others would load it again from the folder of a package that has."""
    sys.meta_path.insert(0, _Moved())
