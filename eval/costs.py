"""What a method of uncertainty costs at use: microseconds per image after the image tower, and passes of towers."""

import time

import numpy as np

from lit_het.eval.metrics.uncertainty import Method
from lit_het.eval.predictions import log_probabilities
from lit_het.eval.sets.open_sets import OpenSet

_TIMED_IMAGES, _REPEATS = 1024, 3


def costs(method: Method, opened: OpenSet) -> dict[str, float]:
    """Returns ``tower_passes``, and ``<prediction>_microseconds`` of the probabilities of up to 1,024 images of a set.

    The time is the fastest of three; noise norms, which no prediction needs, are not in it.
    """
    found: dict[str, float] = {"tower_passes": float(len({member.tower.tower for member in method.members}))}
    features = opened.features_of([member.tower for member in method.members])
    some = [rows.unlabelled().take(np.arange(min(_TIMED_IMAGES, len(rows.values)))) for rows in features]
    for kind in ("quiet", "sampled") if method.has_noise else ("quiet",):
        seconds = []
        for _ in range(_REPEATS + 1):  # the first also compiles
            began = time.perf_counter()
            for member, rows in zip(method.members, some, strict=True):
                log_probabilities(member.quiet() if kind == "quiet" else member.predictor, rows)
            seconds.append(time.perf_counter() - began)
        found[f"{kind}_microseconds"] = 1e6 * min(seconds[1:]) / len(some[0].values)
    return found
