"""Restores a run whose step 2 only process 1 cannot read: ``python -m tests.weights.restore_with_faults``.

Prints JSON with the error message while storage is unavailable, and the step that is restored afterwards.
"""

import json
import sys
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from lit_het import distributed
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.weights.native.saving import Checkpoints


def main(directory: Path, place: str) -> None:
    """Restores twice: with unavailable storage, then with a damaged step 2."""
    distributed.join(place)  # before the import of tests, which run computations
    from tests.weights.test_native import make_state, on

    like = on(MeshConfig(fsdp=2).build(), make_state(0))
    with Checkpoints(directory) as checkpoints:
        load = ocp.load_checkpointables

        def failing(error):
            def fails(folder, wanted):
                if folder.endswith("/2") and jax.process_index() == 1:
                    raise error
                return load(folder, wanted)

            return fails

        message = ""
        ocp.load_checkpointables = failing(TimeoutError("no answer"))
        try:
            checkpoints.restore(like)
        except UserError as error:
            message = str(error)
        ocp.load_checkpointables = failing(ValueError("DATA_LOSS"))
        state, _ = checkpoints.restore(like)
        print(json.dumps({"message": message, "step": int(state.step)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
