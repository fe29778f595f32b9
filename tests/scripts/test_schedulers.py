"""The examples for Slurm and Kubernetes call what there is."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from lit_het.cli.main import main
from lit_het.configs import lit_so400m_het_xl

SLURM, JOBSET = Path("scripts/train_lit.slurm"), Path("scripts/train_lit.jobset.yaml")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True), (134, True), (137, True)])
def test_slurm_requeues_a_job_that_was_asked_to_stop(tmp_path, code, requeued):
    programs = {"srun": f'echo "$@"; exit {code}', "scontrol": f"echo $@ > {tmp_path / 'requeued'}"}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "LIT_HET": "lit-het"}
    found = subprocess.run(
        ["bash", SLURM, "--config", "c.py"], env=variables, capture_output=True, text=True, check=False
    )
    assert found.returncode == code
    assert found.stdout == "--kill-on-bad-exit lit-het train --distributed --start-or-resume --config c.py\n"
    assert (tmp_path / "requeued").exists() == requeued


def test_the_jobset_is_whole_and_its_command_is_one_of_ours(capsys):
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["kind"], jobset["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (job,) = jobset["spec"]["replicatedJobs"]
    of_job = job["template"]["spec"]
    pod = of_job["template"]["spec"]
    (container,) = pod["containers"]
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert of_job["parallelism"] == of_job["completions"] == int(rows) * int(columns) // chips
    assert lit_so400m_het_xl.get_config().data.batch_size % (int(rows) * int(columns)) == 0
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    program, *arguments = [*container["command"], *container["args"]]
    assert program == "lit-het"
    # Every flag is known: what is wrong is that there are no other processes here.
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("lit-het: no other processes found")
