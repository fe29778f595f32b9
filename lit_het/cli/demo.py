"""``lit-het demo``: a page on this machine that shows what a trained model says of images."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from data_pipelines.storage import read_lines, reason
from eval.answers import Answer, NoiseRank, answer, chooser, features_of, noise_ranks, split_labels
from eval.captions import CaptionIndex, index_captions
from eval.evaluation import read_records
from lit_het.cli import runs
from lit_het.cli.classify import decode, read_templates
from lit_het.errors import UserError
from lit_het.tasks.classification import ClassificationTask
from lit_het.training.logging import say
from lit_het.types import Encoder

_PORT = 7860
_NUM_CAPTIONS = 8


def demo(
    checkpoint: Path,
    captions: str | None,
    host: str,
    port: int | None,
    *,
    pretrained: Path | None = None,
    allow_hosts: Sequence[str] = (),
) -> None:
    """Serves the page until it is interrupted.

    Args:
        checkpoint: directory of the run.
        captions: a file of captions to search, one a line, or None.
        host: address to serve at.
        port: of the page; None takes `_PORT`, or a free one where that is taken.
        pretrained: where the run with the locked parameters lies now, if it has moved.
        allow_hosts: further names under which browsers may ask for the page.

    Raises:
        UserError: the extra is missing, the address is taken, the run is no image-text model or cannot be opened, or
            the captions cannot be read.
    """
    try:
        from lit_het.cli.demo_page import serve
    except ImportError as error:
        raise UserError(f"the demo needs {error.name}: pip install 'lit-het[demo]'") from error
    port = _free_port(host, port)
    subject = open_subject(checkpoint, captions, pretrained)
    say(f"the demo is at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
    serve(subject, host, port, allow_hosts)


class Subject:
    """A model that a page asks; its methods may be called from several threads, one is answered at a time.

    Attributes:
        run: the model's.
        captions: to search, or None.
    """

    def __init__(self, run: runs.Run, model: Encoder, captions: CaptionIndex | None):
        self.run, self.captions = run, captions
        self._model, self._records = model, read_records(run.run_dir)
        self._lock = threading.Lock()

    def see(self, data: bytes, name: str) -> tuple[UInt8[np.ndarray, "h w c"], Float[np.ndarray, " f"]]:
        """Returns an image as the image tower sees it, and what it makes of it.

        Raises:
            UserError: the bytes are no image.
        """
        with self._lock:  # one is decoded at a time: a small file may hold a very large image
            square = decode(data, self.run, name)
            return square, next(features_of(self._model.features, [square]))

    def answer(
        self, features: Float[np.ndarray, " f"], labels: str, prompts: str, samples: int, seed: int
    ) -> tuple[tuple[str, ...], Answer]:
        """Returns the labels that somebody wrote, and what the model says of an image.

        Raises:
            UserError: the labels are not two or more, all different.
        """
        found = split_labels(labels)
        with self._lock:
            return found, answer(chooser(self._model, found, read_templates(prompts)), features, samples, seed)

    def noise(self, features: Float[np.ndarray, " f"]) -> tuple[float, list[NoiseRank]]:
        """Returns an image's noise norm, and how it compares with the sets that the run was evaluated on."""
        with self._lock:
            norm = float(self._model.image_noise_norm(features[None])[0])
        return norm, noise_ranks(norm, self._records, self.run.step)

    def nearest(self, features: Float[np.ndarray, " f"]) -> list[tuple[str, float]]:
        """Returns the captions nearest to an image and their cosines; none without an index."""
        if self.captions is None:
            return []
        with self._lock:
            return self.captions.nearest(self._model.image(features[None])[0], _NUM_CAPTIONS)


def open_subject(checkpoint: Path, captions: str | None, pretrained: Path | None = None) -> Subject:
    """Opens a run and embeds the captions; errors are those of `demo`."""
    texts = None if captions is None else read_lines(captions)
    run = runs.open_run(checkpoint, pretrained)
    if isinstance(run.task, ClassificationTask):
        raise UserError(f"{checkpoint} is a classifier; the demo needs a run with a text tower")
    model = run.model()
    assert isinstance(model, Encoder)
    return Subject(run, model, None if texts is None else index_captions(model, texts))


def _free_port(host: str, port: int | None) -> int:
    """Returns the port asked for, or one that is free.

    Raises:
        UserError: the port asked for is taken, or there is no such host.
    """
    try:
        return _bound(host, _PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is not None:
            message = f"--host {host} --port {port}: {reason(error)}; leave out --port to take a free one"
            raise UserError(message) from error
    try:
        return _bound(host, 0)
    except OSError as error:
        raise UserError(f"--host {host}: {reason(error)}; leave it out to serve this machine alone") from error


def _bound(host: str, port: int) -> int:
    """Returns the port that a socket gets; raises OSError where it gets none."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return probe.getsockname()[1]
