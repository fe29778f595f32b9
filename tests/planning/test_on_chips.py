"""Steps compiled by libtpu for chips that nobody has here, in a process of their own."""

import json
import os
import re
import subprocess
import sys

import pytest

from lit_het.configs import experiment, lit_so400m_het_xl
from lit_het.planning import chips
from scripts.studies import plan_chips
from tests import tiny

pytest.importorskip("libtpu", reason="the extra tpu-plan is not installed")


@pytest.fixture(scope="module")
def found():
    command = [
        sys.executable,
        "-m",
        "tests.planning.chips_run",
        "lit",
        "classifier",
        "experts",
        "evaluation",
        "meshes",
        "formulas",
    ]
    run = subprocess.run(command, env=chips.environment(), capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def of_towers(things):
    """Of loops over blocks, whose operations are named after them."""
    return [one for one in things if "/while/body/" in one["origin"] and "shard_map" not in one["origin"]]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lit", "classifier", "experts"])
def test_a_step_compiled_for_chips_is_what_was_traced(found, case):
    step = found[case]
    traced, compiled = step["flops"]
    assert compiled == pytest.approx(traced, rel=0.05)  # of products with single rows the compiler makes sums
    assert step["unknown_loops"] == 0
    assert not step["float64"]
    assert not step["callbacks"]
    # Each parameter and moment is returned in its place.
    assert step["donated"] == step["arrays of the state"]
    # Small arrays lie in the memory on the chip, which neither counts: the formula is tested at full size below.
    assert step["state"] < step["compiled"] < 1.1 * step["formula"]
    assert 0 < step["mfu"] < 1


@pytest.mark.slow
def test_the_formula_of_full_steps_is_within_a_tenth_of_the_compilers_memory(found):
    rows = json.loads(plan_chips.OUTPUT.read_text())["chips"]["rows"]
    assert {name for name, _, _ in found["formulas"]} == {
        "lit_so400m_het_xl",
        "imagenet21k_het_xl",
        "lit_e3_b32_het_xl",
    }
    for name, slices, formula in found["formulas"]:
        (needed,) = (float(row[3]) for row in rows if row[:2] == [name, slices])
        assert formula / 2**30 == pytest.approx(needed, rel=0.1), name


@pytest.mark.slow
def test_towers_multiply_in_bfloat16_and_gather_only_their_own_blocks(found):
    for case in ("lit", "classifier", "experts"):
        towers = of_towers(found[case]["products"])
        assert towers
        assert not [one for one in towers if one["precision"]]
        # The gradient of the softmax, whose other operand is bfloat16.
        wide = [one for one in towers if "f32" in one["dtypes"]]
        assert {tuple(sorted(one["dtypes"])) for one in wide} <= {("bf16", "f32")}
        assert all("BTNH,BSNH->BNTS" in one["origin"] for one in wide)
    step = found["lit"]
    assert not [one for one in step["products"] if one["precision"]]
    axes = {"all-gather": [["fsdp"]], "all-to-all": [["expert"]]}
    sums = [["data"], ["fsdp"], ["data", "fsdp"], ["data", "expert"]]  # of gradients
    for case in ("lit", "classifier", "experts"):
        moved = of_towers(found[case]["collectives"])
        assert {one["kind"] for one in moved} >= ({"all-to-all"} if case == "experts" else {"all-gather"})
        for one in moved:
            assert one["axes"] in (sums if one["kind"] in ("reduce-scatter", "all-reduce") else axes[one["kind"]])
            assert {dtype for dtype, _ in one["shapes"]} == {"bf16"}
    # Gathers of the next kernels run beside the products of these.
    gathers = [one for one in of_towers(step["collectives"]) if one["kind"] == "all-gather"]
    assert sum(one["overlaps"] for one in gathers) > len(gathers) / 2
    keys = [one for one in step["collectives"] if one["axes"] == ["data", "fsdp"] and one["kind"] == "all-gather"]
    assert {dtype for one in keys for dtype, _ in one["shapes"]} == {"bf16", "u32"}  # and hashes of duplicates


@pytest.mark.slow
def test_tokens_of_experts_travel_there_and_back_and_keys_to_all(found):
    kinds = [(one["kind"], tuple(one["axes"])) for one in found["experts"]["collectives"]]
    assert kinds.count(("all-to-all", ("expert",))) == 2
    assert ("all-gather", ("data", "expert")) in kinds


@pytest.mark.slow
def test_eight_chips_share_parameters_on_every_kind_of_slice(found):
    assert [(one["data"], one["fsdp"]) for one in found["meshes"]] == [(8, 8), (8, 8), (8, 8), (32, 8), (256, 8)]


@pytest.mark.slow
def test_an_evaluation_multiplies_in_bfloat16_and_moves_kernels_and_results_only(found):
    features, probabilities = found["evaluation"]["features"], found["evaluation"]["probabilities"]
    for program in (features, probabilities):
        assert program["unknown_loops"] == 0
        assert not program["float64"]
        assert not program["callbacks"]
    assert {tuple(one["dtypes"]) for one in features["products"]} == {("bf16", "bf16")}
    kernels = [one for one in features["collectives"] if one["axes"] == ["fsdp"]]
    assert {(one["kind"], dtype) for one in kernels for dtype, _ in one["shapes"]} == {("all-gather", "bf16")}
    (results,) = (one for one in features["collectives"] if one not in kernels)
    assert (results["kind"], results["axes"], results["shapes"]) == (
        "all-gather",
        ["data", "fsdp"],
        [["f32", [64, 64]]],
    )
    # The division by τ would amplify errors of bfloat16.
    assert {(*one["dtypes"], one["precision"]) for one in probabilities["products"]} == {("f32", "f32", "highest")}
    moved = [(one["kind"], one["axes"], one["shapes"]) for one in probabilities["collectives"]]
    assert ("all-gather", ["data", "fsdp"], [["f32", [4, 16, 10]]]) in moved
    assert all(axes == ["fsdp"] for _, axes, shapes in moved if shapes != [["f32", [4, 16, 10]]])


@pytest.mark.slow
def test_with_libtpu_installed_a_training_on_cpus_says_only_its_progress(tmp_path):
    data = tiny.write_data(tmp_path / "data")
    config = tiny.classifier(lit_so400m_het_xl.get_config(), data, tmp_path / "run")
    experiment.save(config, tmp_path / "small.json")
    environment = {name: value for name, value in tiny.environment().items() if name != "JAX_PLATFORMS"}
    command = ["train", "--config", str(tmp_path / "small.json"), "--run-dir", str(tmp_path / "run")]
    run = subprocess.run(
        [sys.executable, "-m", "lit_het", *command, "--data.threads", "0"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.split(r"[\n\r]+", run.stderr.strip())
    assert [line for line in lines if not re.match(r"indexing: |run: |lit-het: .* a temperature needs ", line)] == []
    assert any(line.startswith("run: 2/2 steps") for line in lines)


@pytest.mark.slow
def test_with_libtpu_installed_commands_start_without_a_warning():
    environment = {name: value for name, value in tiny.environment().items() if name != "JAX_PLATFORMS"}
    program = "from lit_het import library_logs; library_logs.silence(); import jax; print(jax.default_backend())"
    for command in (["-m", "lit_het", "--help"], ["-c", program]):
        run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
        assert run.stderr == ""
    assert run.stdout == "cpu\n"


@pytest.mark.slow
def test_a_plan_for_chips_has_a_page_and_two_of_them_run_at_once(tmp_path):
    environment = {name: value for name, value in tiny.environment().items() if name not in chips.environment()}
    environment |= {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    runs = []
    for number in range(2):
        page = tmp_path / f"plan{number}.html"
        command = ["plan", "--config", "quickstart_lit_het_xl", "--topology", "v5e:1x1", "--output", str(page)]
        runs.append(
            subprocess.Popen(
                [sys.executable, "-m", "lit_het", *command, "--task.head", "deterministic"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for number, run in enumerate(runs):
        told, said = run.communicate()
        assert run.returncode == 0, said
        assert "Bounds, and not measurements" in told
        assert "The step fits with" in told
        plan = json.loads((tmp_path / f"plan{number}.json").read_text())
        assert plan["chips"] == 1
        assert not plan["is_measured"]
        assert plan["plans"][0]["fits"]
        assert "<svg" in (tmp_path / f"plan{number}.html").read_text()
