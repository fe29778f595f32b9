import dataclasses
import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from lit_het.cli.main import main
from lit_het.cli.plan import _reason
from lit_het.configs import imagenet21k_het_xl, lit_e3_b32_het_xl, lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.planning import alternatives, report
from lit_het.planning.plan import Plan, Step, plan
from lit_het.sharding import MeshConfig
from lit_het.towers import routing
from lit_het.towers.vit import ViTConfig
from lit_het.training.step import initial_state
from tests import tiny

pytestmark = pytest.mark.devices

# No dimension of a parameter is a multiple of 11: whatever has one holds examples.
ROWS = 11
BATCH = 8 * ROWS
ALL = ("data", "fsdp", "expert")
CASES = ("fsdp", *(pytest.param(case, marks=pytest.mark.slow) for case in ("experts", "classifier")))


@functools.cache
def small(case: str) -> ExperimentConfig:
    """A recipe in small."""
    match case:
        case "fsdp":
            config, mesh = lit_so400m_het_xl.get_config(), MeshConfig(fsdp=2)
        case "experts":
            config, mesh = lit_e3_b32_het_xl.get_config(), MeshConfig(data=2, fsdp=2, expert=2)
            task = dataclasses.replace(
                config.task, head=DeterministicContrastiveConfig(), loss=SoftmaxLoss("ring", block_size=ROWS)
            )
            config = dataclasses.replace(config, task=task)
        case _:
            config, mesh = imagenet21k_het_xl.get_config(), MeshConfig(data=1, fsdp=8)
            assert isinstance(config.task.head, HetXLConfig)
            head = dataclasses.replace(config.task.head, sampling=SamplingConfig(ROWS, block_size=2**20))
            config = dataclasses.replace(config, task=dataclasses.replace(config.task, head=head))
    config = tiny.shrink(config, Path("data"), Path("run"))
    towers = {}
    for part in {"image_tower", "text_tower"} & {field.name for field in dataclasses.fields(config.task)}:
        tower = getattr(config.task, part)
        depth = 2 if tower.encoder.experts is None else 4
        towers[part] = dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, depth=depth))
    data = dataclasses.replace(config.data, batch_size=BATCH)
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **towers), data=data, mesh=mesh)


@functools.cache
def planned(case: str) -> Plan:
    """The plan of a recipe in small, for eight devices."""
    return plan(small(case), jax.devices(), case)


def holds_examples(collective):
    return any(size % ROWS == 0 for _, shape in collective.shapes for size in shape)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_sharded_step_has_the_collectives_of_the_design_and_the_memory_and_operations_of_the_formulas(case):
    memory, compiled = planned(case).memory, planned(case).compiled
    state = sum(list(memory.values())[:4])
    assert state <= compiled.arguments <= state + 2000  # metrics, and a table of what is returned
    # XLA for CPUs has no reduce-scatter: of the kernels that it gathers it sums whole gradients, not a device's share.
    share = 1 / planned(case).mesh.shape["fsdp"]
    formula = sum(memory.values()) + (1 - share) * memory["gathered kernels"]
    # Of experts the compiler holds more copies of the one-hot places than the formula.
    tolerance = 0.4 if case == "experts" else 0.15
    assert formula == pytest.approx(compiled.arguments + compiled.temporary, rel=tolerance)
    # In so small a model products of single rows, which the compiler takes for sums, are not few.
    assert compiled.program.product_flops * 8 == pytest.approx(planned(case).flops, rel=0.2)

    moved = [one for one in compiled.program.collectives if holds_examples(one)]
    others = [one for one in compiled.program.collectives if not holds_examples(one)]
    # Kernels come from the devices that share them; gradients and metrics are summed over any.
    gathered = [one for one in others if one.kind == "all-gather"]
    assert gathered
    assert {one.axes for one in gathered} == {("fsdp",)}
    assert {one.kind for one in others} == {"all-gather", "all-reduce"}
    found = {(one.kind, one.axes, shape) for one in moved for _, shape in one.shapes}
    match case:
        case "fsdp":  # keys of all devices, and the way back of their gradients
            assert (
                found
                == {
                    ("all-gather", ALL[:2], (BATCH,)),
                    ("all-gather", ALL[:2], (BATCH, 64)),
                    ("all-gather", ALL[:2], (BATCH, 2)),  # hashes of images and texts, which reveal duplicates
                    ("reduce-scatter", ALL[:2], (ROWS, 64)),
                }
            )
        case "experts":  # keys travel round; tokens go to experts and come back
            assert {kind for kind, *_ in found} == {"collective-permute", "all-to-all"}
            assert {axes for kind, axes, _ in found if kind == "all-to-all"} == {("expert",)}
            rings = {shape for kind, _, shape in found if kind == "collective-permute"}
            assert rings == {(ROWS,), (ROWS, 2), (ROWS, 128)}
        case _:
            assert not found


def test_random_patch_sizes_cost_as_much_as_the_smallest():
    config = small("classifier")
    tower = config.task.image_tower
    assert isinstance(tower, ViTConfig)
    size = tower.image_size // 2

    def flops(**fields):
        resized = dataclasses.replace(tower, positions="learned", **fields)
        changed = dataclasses.replace(config, task=dataclasses.replace(config.task, image_tower=resized))
        return Step(changed, changed.mesh.build(jax.devices())).flops()[0]

    smallest = flops(patch_size=size // 2)
    assert flops(patch_size=size) < 0.9 * smallest
    # The kernel is resized by one product, and its gradient by another.
    resizing = 2 * 2 * (size // 2) ** 2 * size**2 * 3 * tower.encoder.width
    assert flops(patch_size=size, patch_sizes=(size, size // 2)) == pytest.approx(smallest + resizing, rel=1e-3)


@pytest.mark.slow
def test_dispatch_to_experts_is_what_products_with_one_hot_vectors_take():
    config = small("experts")
    tower = config.task.image_tower
    assert isinstance(tower, ViTConfig)
    experts = tower.encoder.experts
    assert experts is not None
    # The tower is locked: only the forward pass. A device has a group of 11 images for each member.
    tokens = ROWS * (1 + tower.num_patches)
    slots = routing.capacity(tokens, experts.num_selected, experts.experts_per_member, experts.eval_capacity_factor)
    slots = experts.experts_per_member * min(slots, tokens)
    product = 2 * tokens * slots * tower.encoder.width
    blocks = len(experts.block_numbers(tower.encoder.depth))
    assert planned("experts").dispatch_flops == 8 * experts.num_members * blocks * 2 * product
    assert planned("fsdp").dispatch_flops == 0


@pytest.mark.slow
def test_operations_are_shown_with_and_without_dispatch(capsys, monkeypatch):
    for case in ("experts", "fsdp"):
        made, config = planned(case), small(case)
        monkeypatch.setattr(report, "plan", lambda *_, made=made: made)
        report.report(config, jax.devices(), 32)
        told = capsys.readouterr().out
        shown = re.search(r"without dispatch +\S+ +\S+ +(\S+)", told)
        if case == "fsdp":
            assert shown is None
            assert "Dispatch:" not in told
        else:
            assert shown is not None
            assert float(shown[1]) == pytest.approx((made.flops - made.dispatch_flops) / BATCH / 1e9, abs=1e-3)
            assert "Dispatch: products with one-hot vectors" in told


@pytest.mark.slow
def test_the_state_takes_what_a_real_one_takes():
    this = Step(small("fsdp"), small("fsdp").mesh.build())
    shapes = this.inputs.state
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    made = jax.jit(
        lambda: initial_state(jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes.params), this.optimizer),
        out_shardings=places,
    )()
    held = [sum(shard.data.nbytes for leaf in jax.tree.leaves(made) for shard in leaf.addressable_shards)]
    memory = planned("fsdp").memory
    assert sum(held) == 8 * (memory["trainable parameters"] + memory["optimizer state"])


@pytest.mark.slow
def test_the_plan_reports_what_does_not_fit_and_flags_that_help(capsys, monkeypatch):
    # The second and the third report try the same step.
    monkeypatch.setattr(alternatives, "Step", functools.cache(Step))
    monkeypatch.setattr(Step, "memory", functools.cache(Step.memory))
    config = small("fsdp")
    # Whose steps are traced sooner.
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, head=DeterministicContrastiveConfig()))
    made = planned("fsdp")
    made = dataclasses.replace(made, memory=Step(config, made.mesh).memory())
    monkeypatch.setattr(report, "plan", lambda *_: made)
    size = sum(made.memory.values()) / 2**30
    assert report.report(config, jax.devices(), 32)
    told = capsys.readouterr().out
    assert "8 devices: data 4 x fsdp 2 x expert 1; batch 88, 11 on a device" in told
    assert "It fits into 32 GiB" in told
    assert not report.report(config, jax.devices(), size / 10)
    told = capsys.readouterr().out
    assert "It will not fit into" in told
    helps = re.findall(r"(--\S+ \S+): (\S+) MiB(, which fits)?", told)
    sizes = [float(size) for _, size, _ in helps]
    assert sizes == sorted(sizes, reverse=True)
    assert helps[0][0] == "--mesh.fsdp 4"
    assert "--task.text-tower.encoder.remat full" in told
    assert "--mesh.fsdp 16" not in told  # there are eight devices
    # The advice ends where the step fits; sizes are told with one decimal.
    assert not report.report(config, jax.devices(), (sizes[0] + 0.05) / 2**10)
    assert re.findall(r"(--\S+ \S+): \S+ MiB, which fits", capsys.readouterr().out) == ["--mesh.fsdp 4"]


def test_a_batch_that_the_devices_cannot_share_is_refused_before_anything_is_compiled():
    config = small("fsdp")
    with pytest.raises(UserError, match="batch size 90 is not divisible by the 8 devices"):
        report.report(
            dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=90)), jax.devices(), 32
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs --config FILE and --devices N"),
        (["--config", "x.py"], "plan needs --config FILE and --devices N"),
        (["--config", "x.py", "--devices", "2", "--topology", "v5e:2x2"], "leave one out"),
        (["--config", "x.py", "--devices", "0"], "--devices 0 must be at least 1"),
        (["--config", "x.py", "--devices", "8", "--memory-gib", "0"], "--memory-gib 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_one_line(arguments, message, capsys):
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("plan.json", "names the page, such as .*plan.html"),
        ("file/plan.html", r"cannot be written \(File exists\)"),
        (".", "is a folder"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_minutes_of_compiling(output, reason, tmp_path, capsys):
    (tmp_path / "file").touch()
    arguments = ["plan", "--config", "quickstart_lit_het_xl", "--topology", "v5e:2x2", "--output"]
    assert main([*arguments, str(tmp_path / output)]) == 1
    assert re.fullmatch(rf"lit-het: --output .*{reason}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (-signal.SIGKILL, [], "out of memory"),
        (-signal.SIGABRT, ["LLVM ERROR: pthread_create failed: Resource temporarily unavailable\n"], "out of memory"),
        (-signal.SIGSEGV, ["mmap error: Cannot allocate memory\n", "*** SIGSEGV ***\n"], "out of memory"),
        (-signal.SIGABRT, ["F0101 layout.cc:1 Check failed: rank == 2\n", "\n"], "SIGABRT: F0101 .* rank == 2"),
    ],
)
def test_what_stopped_the_compiler_is_one_line(code, said, reason):
    assert re.fullmatch(f"{reason}[^\n]*", _reason(code, said))


def test_a_stop_ends_the_compiler_too(monkeypatch):
    command = "import sys, time; print('lit-het: compiling', file=sys.stderr, flush=True); time.sleep(600)"
    started = []

    class Compiler(subprocess.Popen):
        def __init__(self, _, **options):
            super().__init__([sys.executable, "-c", command], **options)
            started.append(self)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Compiler)
    monkeypatch.setattr("lit_het.cli.plan.print", stop, raising=False)
    monkeypatch.setattr("lit_het.planning.chips.check_libtpu", lambda: None)
    assert main(["plan", "--config", "quickstart_lit_het_xl", "--topology", "v5e:2x2"]) == 130
    assert started[0].returncode == -signal.SIGKILL
