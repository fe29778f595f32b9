"""Keeps the logs of libraries off the console: what a user must know is an error or a message of lit-het."""

import logging
import os

_LIBRARIES = ("absl", "etils", "fsspec", "gcsfs", "grain", "huggingface_hub", "jax", "orbax", "s3fs", "tensorflow")


def silence() -> None:
    """Silences the loggers of libraries, whatever level they have; call it before they are imported."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        if logger.propagate:
            # Libraries set their level when they are imported, so levels would not do. A logger without any handler
            # prints warnings.
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # it has a handler of its own
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")  # so does this, which says that there is no PyTorch
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings of XLA and TensorFlow in C++; errors stay
