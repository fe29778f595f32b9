"""Trained models for use from Python: `load`, and the `Model` that it returns."""

import itertools
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int
from PIL import Image

from lit_het import arguments, sharding
from lit_het.calibrations import Calibrated
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.answers import BATCH_SIZE, answer, features_of, noise_ranks
from lit_het.eval.evaluation import Record, read_records
from lit_het.eval.metrics.names import calibrated_by
from lit_het.eval.predictions import samples_of
from lit_het.eval.sets.recognition import embed_texts
from lit_het.models.candidates import candidates
from lit_het.models.images import BinaryFile, ImageLike, Images
from lit_het.models.opening import Run, open_run
from lit_het.models.results import Classification, Classifications, classification
from lit_het.models.writing import quantity_of, shown, translations, write_in_batches
from lit_het.paths import require_weights
from lit_het.sharding import MeshConfig
from lit_het.tasks import quantities
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.training.directory import checkpoint_dir
from lit_het.weights.importing import ImportOptions, open_imported, require_no_options


def load(
    address: str | Path,
    *,
    pretrained: str | Path | None = None,
    calibrated: bool = True,
    prior: str | float | None = None,
    mesh: Mesh | MeshConfig | None = None,
    options: ImportOptions | None = None,
) -> "Model":
    """Loads a trained model: a run, or weights of another library.

    Args:
        address: directory of a run, or anything that ``lit-het import`` reads: a Hugging Face folder, a big_vision
            file, a V-MoE checkpoint, local or at an address such as ``hf://owner/name`` or ``gs://...``. Downloads are
            saved in the user's cache.
        pretrained: current path of the run or file with a run's locked parameters, if it was moved.
        calibrated: whether to apply the temperatures of ``lit-het calibrate``, if there are any.
        prior: the right answers that are expected, of a run that was calibrated by names: "seen" (None) and "new" names
            change no ranking; "balanced", or the share of new names.
        mesh: the devices to compute on: a JAX mesh with any axes, or the sizes of the project's own; None for all
            devices. Axes of other names split batches.
        options: what weights of another library do not record, such as ``ImportOptions(image_size=224)``.

    Raises:
        UserError: there is no model at the address, or a file is damaged or does not fit.
    """
    run_dir = Path(address := arguments.path(address, "address"))
    arguments.instance(options, "options", ImportOptions | None, "ImportOptions(...) or None")
    if os.path.isdir(checkpoint_dir(run_dir)):  # unlike Path.is_dir, of any text
        require_no_options(run_dir, options or ImportOptions())
        run = open_run(run_dir, None if pretrained is None else Path(arguments.path(pretrained, "pretrained")))
    elif pretrained is not None:
        raise UserError(f"{address} is not a run directory, and has no locked parameters; leave out pretrained")
    else:
        require_weights(address)
        run = open_imported(address, options)
    return Model(run, calibrated=calibrated_by(calibrated, prior), mesh=mesh)


class Model:
    """A trained model on the devices of a mesh.

    Images are given one by one or as a list: paths, addresses (``https://...``, ``gs://...``), the bytes of image
    files, open files, PIL images, or uint8 arrays ``[h w]``, ``[h w 3]`` and ``[h w 4]``; an array ``[n h w 3]`` is a
    list. They are preprocessed as in the run's evaluations. One image has one result, a list has a list of them. More
    than 32 have a progress bar. A model is neither pickled nor used in a forked process: load it in each, by "spawn".

    Attributes:
        run: configuration, parameters and step of the model.
    """

    def __init__(self, run: Run, *, calibrated: Calibrated = True, mesh: Mesh | MeshConfig | None = None):
        self.run = run
        self._mesh = sharding.as_own(mesh)
        self._model = run.model(calibrated=calibrated, mesh=self._mesh)

    def __reduce__(self) -> Any:
        raise UserError("a model is on its devices, and is not pickled or copied; load it in each process")

    def __repr__(self) -> str:
        kind = "classifier" if self._model.text is None else "image-text model"
        kind = kind if self._model.mask_classes is None else "model of masks"
        kind = "decoder" if self.run.config.task.writes_text else kind
        return f"<Model {self.run.run_dir}: {kind}, step {self.run.step:,}, {self.calibration}>"

    @property
    def calibration(self) -> str:
        """How probabilities were calibrated, in words."""
        return str(self._model.calibration or "not calibrated")

    @overload
    def classify(
        self,
        images: str | Path | bytes | BinaryFile | Image.Image,
        labels: Sequence[str],
        *,
        prompts: str | Sequence[str] | None = None,
        samples: int | None = None,
        seed: int = 0,
        coverage: float | None = None,
    ) -> Classification: ...

    @overload
    def classify(
        self,
        images: list[Any] | tuple[Any, ...],
        labels: Sequence[str],
        *,
        prompts: str | Sequence[str] | None = None,
        samples: int | None = None,
        seed: int = 0,
        coverage: float | None = None,
    ) -> Classifications: ...

    @overload
    def classify(
        self,
        images: np.ndarray,
        labels: Sequence[str],
        *,
        prompts: str | Sequence[str] | None = None,
        samples: int | None = None,
        seed: int = 0,
        coverage: float | None = None,
    ) -> Classification | Classifications: ...

    def classify(
        self,
        images: ImageLike | Sequence[ImageLike],
        labels: Sequence[str],
        *,
        prompts: str | Sequence[str] | None = None,
        samples: int | None = None,
        seed: int = 0,
        coverage: float | None = None,
    ) -> Classification | Classifications:
        """Predicts which label each image has, as ``lit-het classify`` does; images do not change each other's results.

        Args:
            images: one image or several.
            labels: two or more; those of a classifier name all of its classes, in order.
            prompts: templates around each label: a name (``bare``, ``photo``, ``clip80``, ...), a file, or a list
                such as ``["a photo of a {c}."]``; None for the bare labels.
            samples: S, the noise samples of each image; 0 for none; None for as many as were calibrated, or 32.
            seed: of the noise.
            coverage: the probability that the prediction set of an image has the right label, such as 0.9; None for
                no sets. It needs a calibrated run.

        Returns:
            A `Classification`, or `Classifications` of several images.

        Raises:
            UserError: an image cannot be decoded; labels or prompts cannot be used; there are no thresholds of
                prediction sets.
        """
        read = self._images(images)
        samples = samples_of(self._model, samples)
        rows = features_of(self._model.features, read, len(read))
        first = next(rows)  # a broken image shows before many labels are embedded
        among = candidates(self._model, self.run.run_dir, labels, prompts, coverage)
        found = []
        for name, features in zip(read.names, shown(itertools.chain([first], rows), len(read)), strict=True):
            predicted = answer(among.predictor, features, samples, seed)
            ranks = noise_ranks(predicted.noise_norm, self._records, self.run.step)
            found.append(classification(name, predicted, among, ranks, self._model.calibration))
        return found[0] if read.is_single else Classifications(found)

    def encode_images(self, images: ImageLike | Sequence[ImageLike]) -> Float[np.ndarray, "*n d"]:
        """Returns the embedding of each image: unit vectors, whose inner products with those of texts are cosines.

        Those of a head with Gaussian embeddings are the mean and two entries for the variances of both sides, so that
        inner products with texts are what its logits are made of (`GaussianContrastiveConfig`). A classifier has no
        such vectors: it returns the features of its image tower.

        Args:
            images: one image (the result is ``[d]``) or several (``[n d]``).

        Raises:
            UserError: an image cannot be decoded.
        """
        task: Any = self.run.task
        if not task.config.embeds_texts:
            return quantity_of(self._model, None, self._images(images))
        return task.embeddings_of(quantity_of(self._model, quantities.embeddings, self._images(images)))

    def encode_texts(self, texts: str | Sequence[str]) -> Float[np.ndarray, "*n d"]:
        """Returns the unit embedding of each text, with Gaussian embeddings as in `encode_images`.

        Args:
            texts: one text (the result is ``[d]``) or several (``[n d]``); longer ones are cut at the tower's length.

        Raises:
            UserError: the model has no text tower or no tokenizer, or there are no texts.
        """
        if not self.run.config.task.embeds_texts:
            raise UserError(f"{self.run.run_dir} cannot embed text: it is not an image-text model")
        several = arguments.texts([texts] if isinstance(texts, str) else texts, "texts")
        if len(several) <= BATCH_SIZE:
            found = embed_texts(self._model, several)
        else:
            with Bar("encoding texts", len(several), "texts") as bar:
                found = embed_texts(self._model, several, bar.advance)
        task: Any = self.run.task
        return task.embeddings_of(found[0] if isinstance(texts, str) else found)

    def noise(self, images: ImageLike | Sequence[ImageLike]) -> Float[np.ndarray, "*n"]:
        """Returns the noise norm of each image: ``sqrt(tr Σ(x))``, the root mean square norm of the noise.

        It is 0 for a deterministic head. Its scale differs between models.

        Args:
            images: one image (the result is a scalar) or several (``[n]``).

        Raises:
            UserError: an image cannot be decoded, or the model has no head.
        """
        return quantity_of(self._model, quantities.noise_norm, self._images(images))

    def segment(self, images: ImageLike | Sequence[ImageLike]) -> Int[np.ndarray, "*n size size 2"]:
        """Returns masks: the class of each pixel, from 1 with 0 for void, and the number of its instance, 0 for none.

        Classes are those of ``categories.json``, in order. A mask has the size of the model's images, and shows what
        its preprocessing leaves of them.

        Args:
            images: one image (the result is ``[size size 2]``) or several (``[n size size 2]``).

        Raises:
            UserError: an image cannot be decoded, or the model predicts no masks.
        """
        return quantity_of(self._model, quantities.masks, self._images(images))

    def caption(
        self,
        images: ImageLike | Sequence[ImageLike],
        prompt: str | None = None,
        *,
        samples: int | None = None,
        seed: int = 0,
        num_tokens: int | None = None,
        **generation: Any,
    ) -> Any:
        """Writes texts about images with a decoder, as ``lit-het caption`` does.

        Args:
            images: one or several.
            prompt: what the texts follow; None for that of training.
            samples: S, the noise samples that each token's probability is averaged over, as of `classify`.
            seed: of the noise and of sampling.
            num_tokens: most tokens of a text; None for 32, or as many as fit.
            generation: fields of `lit_het.texts.GenerationConfig`, such as ``num_texts=5``.

        Returns:
            The texts of an image, the best first, each a `lit_het.texts.Written`; of several images a list.

        Raises:
            UserError: an image cannot be decoded, the model is not a decoder, or prompt and texts do not fit it.
        """
        writer = self._writer
        prompt = writer.caption_prompt if prompt is None else arguments.text(prompt, "prompt")
        if num_tokens is None:
            how = GenerationConfig(**generation).within(writer.max_new_tokens(prompt))
        else:
            how = GenerationConfig(num_tokens=num_tokens, **generation)
        read, samples = self._images(images), samples_of(writer, samples)
        rows = shown(features_of(writer.features, read, len(read)), len(read))
        found = write_in_batches(writer, rows, len(read), prompt, how, samples=samples, seed=seed)
        return found[0] if read.is_single else found

    def ask(
        self,
        image: ImageLike,
        question: str,
        answers: Sequence[str] | None = None,
        *,
        samples: int | None = None,
        seed: int = 0,
        **generation: Any,
    ) -> "list[Written]":
        """Answers a question about an image with a decoder, as ``lit-het ask`` does.

        Args:
            image: the image.
            question: written as in training.
            answers: to rank by their probability; None to answer freely.
            samples: as of `caption`.
            seed: of the noise and of sampling.
            generation: as of `caption`.

        Returns:
            Answers, the most probable first.

        Raises:
            UserError: as `caption`, or answers are missing, repeated or too long.
        """
        writer = self._writer
        prompt = writer.question_prompt(arguments.text(question, "question"))
        if answers is not None and (written := [name for name, value in generation.items() if value is not None]):
            raise UserError(f"{written[0]} writes answers, and given ones are ranked; leave one out")
        if answers is None:
            return self.caption([image], prompt, samples=samples, seed=seed, **generation)[0]
        read = self._images([image])
        features = next(features_of(writer.features, read, 1))
        return writer.rank(features, prompt, answers, samples=samples_of(writer, samples), seed=seed)

    def translate(
        self,
        texts: str | Sequence[str],
        prompt: str | None = None,
        *,
        samples: int | None = None,
        seed: int = 0,
        **generation: Any,
    ) -> Any:
        """Translates texts with an encoder and a decoder, as ``lit-het translate`` does.

        Args:
            texts: one text or several; none is cut.
            prompt: what the translations follow; None for that of training.
            samples: as of `caption`.
            seed: as of `caption`.
            generation: as of `caption`; by default 4 beams, or one sample, of as many tokens as fit.

        Returns:
            As `caption`.

        Raises:
            UserError: the model does not translate, or a text, or prompt and translation, have too many tokens.
        """
        several = arguments.texts([texts] if isinstance(texts, str) else texts, "texts")
        found = translations(self.run, self._writer, several, prompt, generation, samples=samples, seed=seed)
        return found[0] if isinstance(texts, str) else found

    def save_pretrained(self, folder: str | Path, *, licence: str | None = None) -> None:
        """Writes the model to a folder that `lit_het.load` opens with equal outputs, noise and calibration included.

        The folder holds ``model.safetensors``, ``config.json``, the tokenizer and a model card. ``lit-het export`` has
        the formats of other libraries.

        Args:
            folder: empty, or not there yet.
            licence: for the card, such as ``apache-2.0``; None for none.

        Raises:
            UserError: the folder is not empty or cannot be written.
        """
        from lit_het.weights.exporting import require_empty, write_portable

        folder = Path(arguments.path(folder, "folder"))
        require_empty(folder)
        try:
            write_portable(self.run, folder, folder.name, licence)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}") from error

    def push_to_hub(self, repository: str, *, licence: str | None = None) -> None:
        """Uploads what `save_pretrained` writes to the Hugging Face Hub.

        Args:
            repository: ``owner/name``; created if it does not exist.
            licence: for the card, such as ``apache-2.0``; None for none.

        Raises:
            UserError: there is no token, the Hub cannot be reached, or it refuses.
        """
        from lit_het.weights.exporting import push_portable

        push_portable(self.run, arguments.text(repository, "repository"), licence)

    def _images(self, images: Any) -> Images:
        if self.run.config.task.reads == "text":
            raise UserError(f"{self.run.run_dir} translates texts, and reads no images; use translate")
        return Images(images, self.run.config.data)

    @property
    def _writer(self) -> TextWriter:
        if self._model.writer is None:
            raise UserError(f"{self.run.run_dir} is not a decoder; train one, see docs/decoder.md")
        return self._model.writer

    @cached_property
    def _records(self) -> list[Record]:
        return read_records(self.run.run_dir)
