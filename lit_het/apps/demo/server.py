"""``lit-het demo``: a local page that shows the predictions of a trained model for images, or a decoder's texts."""

import socket
from collections.abc import Sequence
from pathlib import Path

from lit_het.apps.demo.model import open_model
from lit_het.calibrations import Calibrated
from lit_het.console import message
from lit_het.data_pipelines.shards.storage import reason
from lit_het.errors import UserError

_PORT = 7860


def demo(
    checkpoint: Path,
    captions: str | None,
    host: str,
    port: int | None,
    *,
    pretrained: Path | None = None,
    allow_hosts: Sequence[str] = (),
    calibrated: Calibrated = True,
) -> None:
    """Serves the page until it is interrupted.

    Args:
        checkpoint: directory of the run.
        captions: a file of captions to search, one a line, or None.
        host: address to serve at.
        port: of the page; None takes `_PORT`, or a free one where that is taken.
        pretrained: where the run with the locked parameters lies now, if it has moved.
        allow_hosts: further names under which browsers may ask for the page.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any; or a prior.
    """
    try:
        from lit_het.apps.demo.page import serve
    except ImportError as error:
        raise UserError(f"the demo needs {error.name}: pip install 'lit-het[demo]'") from error
    port = _free_port(host, port)
    model = open_model(checkpoint, captions, pretrained, calibrated=calibrated)
    message(f"the demo is at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
    serve(model, host, port, allow_hosts)


def _free_port(host: str, port: int | None) -> int:
    """Returns the port asked for, or one that is free."""
    try:
        return _bound(host, _PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is not None:
            problem = f"--host {host} --port {port}: {reason(error)}; leave out --port to take a free one"
            raise UserError(problem) from error
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
