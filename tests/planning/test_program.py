import pytest

from lit_het.planning.program import read_program
from lit_het.sharding import MeshConfig

MESH = MeshConfig(data=2, fsdp=2, expert=2).build()

LOOP = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%body (state: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %kernel = f32[6,8]{1,0} parameter(0)
  %row = bf16[4,6]{1,0} parameter(1)
  %out = f32[4,8]{1,0} dot(%row, %kernel), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all = f32[6,8]{1,0} all-gather(%kernel), replica_groups={{0,2},{1,3},{4,6},{5,7}}, metadata={op_name="f/dot"}
}

ENTRY %main (x: f32[4,6]) -> f32[4,6] {
  %x = f32[4,6]{1,0} parameter(0)
  %image = f32[2,9,9,3]{3,2,1,0} parameter(1)
  %filter = f32[3,3,3,5]{3,2,1,0} parameter(2)
  %seen = f32[2,7,7,5]{3,2,1,0} convolution(%image, %filter), window={size=3x3}, dim_labels=b01f_01io->b01f
  %loop = (s32[], /*index=1*/f32[4,6]{1,0}) while(%x), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %again = (s32[], f32[4,6]{1,0}) while(%x), condition=%cond, body=%body
  ROOT %mean = (f32[3]{0}, bf16[2]{0}) all-reduce(%x, %x), replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_loops_count_once_per_iteration_and_those_of_unknown_length_once():
    program = read_program(LOOP, MESH)
    assert program.unknown_loops == 1
    reduce, gather = program.collectives
    assert gather.times == 5 + 1
    assert reduce.times == 1
    in_loops = 2 * (4 * 8) * 6
    convolution = 2 * (2 * 7 * 7 * 5) * (3 * 3 * 3)
    assert program.product_flops == 6 * in_loops + convolution


def test_a_collective_has_its_axis_its_shapes_and_the_bytes_that_a_device_sends():
    reduce, gather = read_program(LOOP, MESH).collectives
    assert (gather.kind, gather.axes, gather.group, gather.origin) == ("all-gather", ("fsdp",), 2, "f/dot")
    assert gather.bytes_sent == 6 * (6 * 8 * 4) / 2  # its half goes to the other one
    assert reduce.shapes == (("f32", (3,)), ("bf16", (2,)))
    assert reduce.axes == ("data", "fsdp", "expert")
    assert reduce.bytes_sent == 2 * (3 * 4 + 2 * 2) * 7 / 8


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("expert",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[2,4]<=[8]", ("fsdp", "expert")),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("data", "expert")),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data", "fsdp")),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("expert",)),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", None),
        ("replica_groups={}", ("data", "fsdp", "expert")),
    ],
)
def test_groups_of_devices_are_named_by_the_axes_of_the_mesh(groups, axes):
    text = f"ENTRY %main () -> f32[] {{\n  ROOT %one = f32[8]{{0}} all-to-all(%x), {groups}\n}}\n"
    (found,) = read_program(text, MESH).collectives
    assert found.axes == axes


def test_a_ring_is_recognized_by_its_pairs_and_asynchronous_collectives_count_their_results():
    pairs = ",".join(f"{{{i},{(i + 1) % 8}}}" for i in range(8))
    ring = f"ROOT %one = f32[8] collective-permute(%x), source_target_pairs={{{pairs}}}"
    gather = "%one = (f32[4], f32[8]) all-gather-start(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    (ring,), (gather,) = (
        read_program(f"ENTRY %main () -> f32[] {{\n  {line}\n}}\n", MESH).collectives for line in (ring, gather)
    )
    assert (ring.axes, ring.group, ring.bytes_sent) == (("data", "fsdp", "expert"), 8, 32)
    assert gather.shapes == (("f32", (8,)),)


PERMUTE = """HloModule step, is_scheduled=true

ENTRY %main (x: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  %sent = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), \
source_target_pairs={{0,2},{2,0}}
  ROOT %found = bf16[8,16]{1,0} collective-permute-done(%sent)
}
"""


def test_a_permutation_on_a_tpu_sends_its_array_once():
    program = read_program(PERMUTE, MESH)
    (ring,) = program.collectives
    assert ring.shapes == (("bf16", (8, 16)),)
    assert ring.bytes_sent == 8 * 16 * 2
    (work,) = program.works
    assert work.hbm_bytes == 2 * 8 * 16 * 2  # read here and written there


BRANCHES = """HloModule step, is_scheduled=true

%one (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  ROOT %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%two (u: f32[4,4]) -> f32[4,4] {
  %u = f32[4,4]{1,0} parameter(0)
  %v = f32[4,4]{1,0} dot(%u, %u), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %w = f32[4,4]{1,0} dot(%v, %u), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: pred[], b: f32[4,4]) -> f32[4,4] {
  %a = pred[] parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %c = f32[4,4]{1,0} conditional(%a, %b, %b), ROLES
}
"""


@pytest.mark.parametrize("roles", ["branch_computations={%one, %two}", "true_computation=%two, false_computation=%one"])
def test_of_two_branches_that_with_more_products_counts(roles):
    assert read_program(BRANCHES.replace("ROLES", roles), MESH).product_flops == 2 * 2 * 4**3
