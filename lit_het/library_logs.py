"""Keeps the logs of libraries off the console: what a user must know is an error or a message of lit-het."""

import glob
import logging
import os

NO_CHIPS = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
"""What libtpu wants to know of a machine, in variables of its environment, for one without chips."""

# Device files of chips: up to v4, and from v5e on.
_CHIPS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


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
    if not any(glob.glob(pattern) for pattern in _CHIPS):
        # Where libtpu is installed as a compiler (`lit-het plan --topology`), JAX asks it for chips, and it complains
        # in four lines that it does not know the machine.
        for name, value in NO_CHIPS.items():
            os.environ.setdefault(name, value)


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from lit_het.console import message  # here, as it imports JAX

        message(record.getMessage(), on_all_processes=True)
