"""Stands in for ``gcloud`` where TPU slices are folders below ``$FAKE_CLOUD`` and workers are local processes.

A worker has four virtual devices. Slurm's variables let JAX find the others, as a slice's metadata would.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

WORKERS = 2


def main(arguments: list[str]) -> int:
    """Does what one command asks for, and keeps a record of it."""
    cloud = Path(os.environ["FAKE_CLOUD"])
    with (cloud / "commands.txt").open("a") as file:
        file.write(" ".join(arguments) + "\n")
    assert arguments[:2] == ["compute", "tpus"]
    kind, action, *rest = arguments[2:]
    state = cloud / "state"
    match kind, action:
        case "queued-resources", "describe":
            if not state.exists():
                print("ERROR: NOT_FOUND: the resource does not exist", file=sys.stderr)
                return 1
            print(state.read_text())
            if state.read_text() == "WAITING_FOR_RESOURCES":
                state.write_text("ACTIVE")
        case "queued-resources", "create":
            for number in range(WORKERS):
                (cloud / f"worker-{number}").mkdir()
            state.write_text("WAITING_FOR_RESOURCES")
        case "queued-resources", "delete":
            for number in range(WORKERS):
                shutil.rmtree(cloud / f"worker-{number}")
            state.unlink()
        case "tpu-vm", "scp":
            for number in range(WORKERS):
                shutil.copy(rest[0], cloud / f"worker-{number}" / rest[1].partition(":")[2])
        case "tpu-vm", "ssh":
            return ssh(cloud, rest[rest.index("--worker") + 1], rest[rest.index("--command") + 1])
        case _:
            return 2
    return 0


def ssh(cloud: Path, worker: str, command: str) -> int:
    """Runs a command on one worker or on all, or on none as often as ``$FAKE_CLOUD/broken`` tells."""
    broken = cloud / "broken"
    if broken.exists() and (left := int(broken.read_text())):
        broken.write_text(str(left - 1))
        return 255
    started = []
    for number in range(WORKERS) if worker == "all" else [int(worker)]:
        home = cloud / f"worker-{number}"
        job = {"SLURM_JOB_ID": os.environ["FAKE_JOB"], "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": WORKERS}
        own = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "HOME": home}
        variables = {**os.environ, **{name: str(value) for name, value in {**job, **own}.items()}}
        variables["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
        started.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=variables))
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
