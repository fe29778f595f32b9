"""Keeps the logs of libraries off the console: what a user must know is an error or a message of lit-het."""

import importlib.util
import logging
import os
from pathlib import Path

NO_CHIPS = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
"""What libtpu wants to know of a machine, in variables of its environment, for one without chips."""

# Files of chips: up to v4, and from v5e on.
_DEVICES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
# Classes of PCI devices: storage and network.
_COMMON = ("0x01", "0x02")


def silence() -> None:
    """Silences the loggers of all libraries, and shows the warnings of lit-het; call it before they are imported."""
    # Where the root has no handler, Python prints warnings, and Abseil gives it one: from then on every warning, of
    # lit-het too, is a line "WARNING:module:...". An application with handlers of its own keeps them.
    if not logging.root.handlers:
        logging.root.addHandler(logging.NullHandler())
        logging.getLogger("lit_het").addHandler(_Messages(logging.WARNING))
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # it has a handler of its own
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")  # so does this, which says that there is no PyTorch
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings of XLA and TensorFlow in C++; errors stay
    if importlib.util.find_spec("libtpu") and not may_have_chips(Path("/")):
        # It is installed as a compiler (`lit-het plan --topology`). JAX asks it for chips, and it complains in four
        # lines that it does not know the machine.
        for name, value in NO_CHIPS.items():
            os.environ.setdefault(name, value)


def may_have_chips(root: Path) -> bool:
    """Returns whether the system below a folder shows TPU chips: as a device, or as a card of Google's."""
    cards = root.glob("sys/bus/pci/devices/*")
    # Google's virtual disks and network cards have its number too.
    unknown = (
        card for card in cards if _read(card / "vendor") == "0x1ae0" and _read(card / "class")[:4] not in _COMMON
    )
    return any(True for pattern in _DEVICES for _ in root.glob(pattern)) or any(unknown)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from lit_het.console import message  # here, as it imports JAX

        message(record.getMessage(), on_all_processes=True)
