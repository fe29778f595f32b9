"""``lit-het calibrate``: fits the temperatures of a trained run on images that it was not trained on."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from lit_het.calibrations import Calibration, FittedTemperature, NameCalibration
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.data_pipelines.shards.sample_tables import names_any
from lit_het.data_pipelines.shards.writing import expand
from lit_het.data_pipelines.texts.captions import Tokenizer
from lit_het.data_pipelines.texts.familiarity import Familiarity
from lit_het.errors import UserError, pluralize, require_at_least
from lit_het.eval.features import Features, read_features
from lit_het.eval.metrics.calibration import fit, scaled
from lit_het.eval.metrics.conformal import ConformalThresholds, candidates_digest, fit_conformal
from lit_het.eval.predictions import Predictor, predict
from lit_het.eval.report.tables import Table, plain_table
from lit_het.eval.report.writing import print_results
from lit_het.eval.sets.recognition import distinct_captions, embed_texts, report_equal
from lit_het.models.calibration.by_names import OneTemperature, fit_by_names
from lit_het.models.calibration.saved import calibration_path, write_calibration
from lit_het.models.calibration.seen_images import seen
from lit_het.models.calibration.seen_names import require_familiarity
from lit_het.models.calibration.split import LEAST_IMAGES, MOST_IMAGES
from lit_het.models.calibration.tokens import read_tokens
from lit_het.models.opening import Run, open_run
from lit_het.models.writer import Writer
from lit_het.types import Batch, EvaluatedModel

_BATCH_SIZE = 64  # images per device, as in evaluations
_TEXTS = 8  # per device: each of their tokens has a log-probability of the whole vocabulary


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """How temperatures are fitted.

    Attributes:
        shards: of images with captions or, for a classifier, with labels.
        portion: of their samples.
        samples: S, the noise samples of an image; without effect for a head without noise.
        embeddings: a folder written by ``lit-het embed`` for these shards, read in place of images.
    """

    shards: tuple[str, ...]
    portion: Portion = ALL
    samples: int = 16
    embeddings: str | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "samples")


class SeenByModel(UserError):
    """The model that a run has its towers from was trained on the images."""


def calibrate(run_dir: Path, options: CalibrateOptions, *, pretrained: Path | None = None) -> Calibration:
    """Fits the temperatures of a run's newest checkpoint, prints them, and writes ``calibration.json`` into the run.

    An image-text model chooses among the distinct captions of all images, and the label of an image is its caption, of
    several the first; a classifier chooses among its classes; a decoder chooses each token of the first text of an
    image, given the tokens before it. Predictions are fitted without noise and, if the head has noise, as means over S
    samples.
    """
    run = open_run(run_dir, pretrained)
    model = run.model(calibrated=False)
    is_decoder = run.config.task.writes_text
    if model.num_classes == 0 and not is_decoder:
        raise UserError(f"{run_dir} is an image tower without head: it has no classes to calibrate")
    # Of an image-text model with a decoder beside, the temperature is that of its images and texts.
    writer = model.writer if is_decoder else None
    assert writer is None or isinstance(writer, Writer)
    (writer or model).check_samples(options.samples)
    captions: dict[str, np.ndarray] = {}  # with the tokens of each
    loader = _open(run, model, options, captions)
    _require_enough(loader.num_samples, options)
    _check_unseen(run, loader, pretrained)
    if writer is None:
        familiarity = None if model.text is None else _familiarity(run, pretrained)
        fits = _fit_images(model, loader, options, captions, familiarity)
    else:
        fits = _fit_tokens(writer, loader, options)
    report_equal("caption", sorted(captions.items()))
    found = Calibration(
        data=options.shards,
        portion=str(options.portion),
        digest=loader.digest,
        num_images=fits.num_images,
        num_candidates=fits.num_candidates,
        num_samples=max(fits.by_samples),
        noiseless=fits.by_samples[0],
        monte_carlo=fits.by_samples[max(fits.by_samples)] if len(fits.by_samples) > 1 else None,
        names=fits.names,
    )
    write_calibration(run_dir, run.step, found, fits.conformal)
    print_results(_table(found, fits))
    message(f"{calibration_path(run_dir)} is applied by default; --uncalibrated leaves it out")
    return found


@dataclasses.dataclass(frozen=True)
class _Fits:
    """Fitted temperatures.

    Attributes:
        by_samples: by the number of noise samples, 0 without noise.
        num_images: that they were fitted on.
        num_candidates: among how many captions, classes or tokens the model chose.
        conformal: thresholds of prediction sets; None for a decoder.
        names: how predictions of names that training had and of new ones differ; None where one temperature is for all.
        num_tokens: that they were fitted on; None where each image has one prediction.
        token_errors: calibration errors of tokens before and after, by the number of noise samples.
    """

    by_samples: dict[int, FittedTemperature]
    num_images: int
    num_candidates: int
    conformal: ConformalThresholds | None = None
    names: NameCalibration | None = None
    num_tokens: int | None = None
    token_errors: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)


def _familiarity(run: Run, pretrained: Path | None) -> Familiarity | None:
    """Returns the table of the run's training captions; None, with a message, if there can be none."""
    try:
        return require_familiarity(run.run_dir, run.config, run.task, run.data_digest, pretrained)
    except UserError as error:
        message(f"names that {run.run_dir} was trained on are not told from new ones: {error}")
        return None


def _fit_images(
    model: EvaluatedModel,
    loader: Loader,
    options: CalibrateOptions,
    captions: dict[str, np.ndarray],
    familiarity: Familiarity | None,
) -> _Fits:
    """Fits the choice among captions or classes."""
    features, tokens = _read(model, loader, " ".join(options.shards))
    _require_enough(len(features.labels), options)
    candidates, num_candidates, texts = None, model.num_classes or 0, list[list[str]]()
    if tokens is not None:
        first, labels = distinct_captions(tokens, " ".join(options.shards))
        features, num_candidates = dataclasses.replace(features, labels=labels), len(first)
        texts = _texts_of(tokens[first], captions)
        with Bar("embedding captions", num_candidates, "captions") as bar:
            candidates = embed_texts(model, tokens[first], bar.advance)
    log_p = {
        count: predict(Predictor(model, num_candidates, candidates, count), features).log_probabilities
        for count in sorted({0, options.samples if model.has_noise else 0})
    }
    names, chosen = _fit_names(log_p, features.labels, texts, familiarity)
    log_p, labels = {count: values[chosen] for count, values in log_p.items()}, features.labels[chosen]
    fitted = {count: fit(values, labels) for count, values in log_p.items()}
    # A single temperature depends so little on any one image that the images stay exchangeable with new ones.
    conformal = fit_conformal(scaled(log_p[0], fitted[0].temperature), labels)
    if tokens is not None:
        conformal = dataclasses.replace(conformal, candidates=candidates_digest(tokens))
    return _Fits(fitted, len(features.labels), num_candidates, conformal, names)


def _fit_names(
    log_p: Mapping[int, np.ndarray],
    labels: Int[np.ndarray, " n"],
    texts: Sequence[Sequence[str]],
    familiarity: Familiarity | None,
) -> tuple[NameCalibration | None, Bool[np.ndarray, " n"]]:
    """Returns how predictions of seen and new names differ, and the images that the temperature of all is fitted on.

    These are the images of seen names, as without held-out names; or all where one temperature is for both.
    """
    everything = np.ones(len(labels), bool)
    if familiarity is None:
        return None, everything
    try:
        return fit_by_names(log_p, labels, texts, familiarity)
    except OneTemperature as reason:
        message(f"one temperature for all names: {reason}")
        return None, everything


def _texts_of(tokens: Int[np.ndarray, "k l"], captions: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Returns the captions that have each row of tokens."""
    by_tokens: dict[bytes, list[str]] = {}
    for text, row in captions.items():
        by_tokens.setdefault(row.tobytes(), []).append(text)
    return [by_tokens.get(row.tobytes(), []) for row in tokens]


def _fit_tokens(writer: Writer, loader: Loader, options: CalibrateOptions) -> _Fits:
    """Fits the choice of each token of a decoder."""
    samples = sorted({0, writer.check_samples(options.samples)})
    tokens = read_tokens(writer, loader, samples, " ".join(options.shards))
    _require_enough(tokens.num_images, options)
    fitted = {count: tokens.fit(count) for count in samples}
    errors = {count: tokens.calibration_errors(count, fitted[count].temperature) for count in samples}
    return _Fits(fitted, tokens.num_images, writer.vocabulary_size, num_tokens=len(tokens.label), token_errors=errors)


def _table(calibration: Calibration, fits: _Fits) -> Table:
    """Returns the temperatures and what they change: likelihoods, and calibration errors of tokens."""
    count, chosen = calibration.num_images, pluralize(calibration.num_candidates, "candidate")
    title = f"{pluralize(count, 'image')}, {chosen}"
    if fits.num_tokens is not None:
        title = f"{pluralize(count, 'text')}, means over {fits.num_tokens:,} tokens"
    columns = ["NLL before", "NLL after", *(["ECE before", "ECE after"] if fits.token_errors else [])]
    rows = []
    for count, fitted in fits.by_samples.items():
        name = f"mean of {pluralize(count, 'sample')}" if count else "no noise"
        values = (fitted.nll_before, fitted.nll_after, *fits.token_errors.get(count, ()))
        rows.append((name, str(fitted), *(f"{value:.4f}" for value in values)))
        if (names := calibration.fitted_names(count)) is not None:
            of_new = names.alone
            rows.append((f"{name}, new names", str(of_new), f"{of_new.nll_before:.4f}", f"{of_new.nll_after:.4f}"))
            rows.append((f"{name}, both kinds", str(names), "", ""))
    return plain_table(title, ("T ± standard error", *columns), rows)


def _open(run: Run, model: EvaluatedModel, options: CalibrateOptions, captions: dict[str, np.ndarray]) -> Loader:
    """Returns the loader of the images with their captions, which it adds to ``captions`` as it reads, or labels."""
    trained_on, is_decoder = run.config.data, run.config.task.writes_text
    labels = None if model.text is not None or is_decoder else trained_on.labels or ClassIndex()
    if labels is not None and not labels.has_one_class:
        raise UserError(
            f"{run.run_dir} is a classifier of several labels an image, for which there is no temperature; its "
            "probabilities are used as trained"
        )
    # What training leaves out of these shards, or weights less, is not a standard for other images either.
    is_own = options.shards == trained_on.shards
    suspects = trained_on.suspects if is_own else None
    data = LoaderConfig(
        shards=options.shards,
        image_size=trained_on.image_size,
        batch_size=(_TEXTS if is_decoder else _BATCH_SIZE) * model.features.num_shards,
        labels=labels,
        portion=options.portion,
        captions=trained_on.captions,
        # Without tags, as the names of classes are.
        language=trained_on.language and dataclasses.replace(trained_on.language, tag="") if is_own else None,
        caption_unit=trained_on.caption_unit,
        prompt=trained_on.prompt if is_decoder else None,
        source=trained_on.source,
        preprocessing=trained_on.preprocessing,
        max_bad_fraction=trained_on.max_bad_fraction,
        embeddings=options.embeddings,
        suspects=None if suspects is None else dataclasses.replace(suspects, weight=0.0),
        # A table may be of the mixture alone.
        exclude=tuple(table for table in trained_on.exclude if is_own and names_any(table, expand(options.shards))),
    )
    tokenize = None if model.text is None else _noting(model.text.tokenize, captions)
    loader = Loader(data, run.tokenizer if is_decoder else tokenize)
    if loader.stored is not None:
        loader.stored.check_tower(run.tower)
    if labels is not None and loader.num_classes != model.num_classes:
        raise UserError(
            f"{' '.join(options.shards)} has {loader.num_classes} classes, the classifier {model.num_classes}; "
            "calibrate on images of its classes"
        )
    return loader


def _noting(tokenize: Tokenizer, captions: dict[str, np.ndarray]) -> Tokenizer:
    """Returns the tokenizer, which adds every text and its tokens to ``captions``."""

    def noted(texts: list[str]) -> np.ndarray:
        tokens = tokenize(texts)
        captions.update((text, row) for text, row in zip(texts, tokens, strict=True) if text)  # not of an invalid row
        return tokens

    return noted


def _read(model: EvaluatedModel, loader: Loader, name: str) -> tuple[Features, Int[np.ndarray, "n l"] | None]:
    """Returns the features of the images, and the tokens of their captions."""
    tokens: list[np.ndarray] = []

    def noted(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if batch.text is not None:
                tokens.append(batch.text[batch.valid])
            yield batch

    count = min(loader.num_samples, MOST_IMAGES)
    with Bar(f"reading {name}", count, "images") as bar:
        [features] = read_features([model.features], noted(loader.epoch(num_samples=count)), bar.advance, name)
    return features, np.concatenate(tokens) if tokens else None


def _require_enough(num_images: int, options: CalibrateOptions) -> None:
    if num_images < LEAST_IMAGES:
        raise UserError(
            f"{' '.join(options.shards)} has {pluralize(num_images, 'image')} to calibrate on; take at least "
            f"{LEAST_IMAGES}"
        )


def _check_unseen(run: Run, held_out: Loader, pretrained: Path | None) -> None:
    """Checks that neither the run nor a model that its towers come from was trained on a sample."""
    if (found := seen(run.run_dir, held_out, pretrained)) is None:
        return
    if found.model != run.run_dir:
        raise SeenByModel(
            f"{found.model}, from which {run.run_dir} has its towers, was trained on images of {found.shard}; take "
            f"others: lit-het calibrate {run.run_dir} --data OTHERS"
        )
    raise UserError(
        f"{run.run_dir} was trained on images of {found.shard}; calibrate on others, such as those that "
        "--data.portion :98% leaves out of a training, with --portion 98%:"
    )
