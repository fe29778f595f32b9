"""Restores a run of which process 1 alone cannot read step 2: ``python -m tests.checkpoints.restore_with_faults``.

Prints, as JSON, what this process is told while storage does not answer, and from which step it goes on once it does.
"""

import json
import sys
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from lit_het import distributed
from lit_het.checkpoints.native.saving import Checkpoints
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig


def main(directory: Path, place: str) -> None:
    """Tries twice, the second time with a damaged step."""
    distributed.join(place)  # before tests are imported, which compute
    from tests.checkpoints.test_native import make_state, on

    like = on(MeshConfig(fsdp=2).build(), make_state(0))
    with Checkpoints(directory) as checkpoints:
        load = ocp.load_checkpointables

        def failing(error):
            def fails(folder, wanted):
                if folder.endswith("/2") and jax.process_index() == 1:
                    raise error
                return load(folder, wanted)

            return fails

        told = ""
        ocp.load_checkpointables = failing(TimeoutError("no answer"))
        try:
            checkpoints.restore(like)
        except UserError as error:
            told = str(error)
        ocp.load_checkpointables = failing(ValueError("DATA_LOSS"))
        state, _ = checkpoints.restore(like)
        print(json.dumps({"told": told, "step": int(state.step)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
