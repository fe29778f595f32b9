"""Programs as XLA writes them for TPUs, by hand."""

import math

import numpy as np
import pytest

from lit_het.planning import hlo
from lit_het.planning.chips import Topology
from lit_het.planning.lifetimes import life
from lit_het.planning.program import read_program
from lit_het.planning.roofline import roofline
from lit_het.sharding import MeshConfig

MESH = MeshConfig(data=2, fsdp=4).build()

# A loop of three iterations over blocks: a gather that runs beside a product (two links of one chain), and a product
# whose kernel is sliced from the stack; then a sum that is scattered, and a transfer to another slice.
STEP = """HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%condition (state: (s32[], bf16[3,16,256])) -> pred[] {
  %length = s32[]{:T(128)} constant(3)
  %state.1 = (s32[]{:T(128)}, bf16[3,16,256]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %below = pred[]{:T(512)} compare(%count, %length), direction=LT
}

%begin (p: bf16[4,256]) -> bf16[16,256] {
  %p = bf16[4,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather = bf16[16,256]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %started = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%multiply (stack: bf16[3,16,256], x: bf16[32,16], q: bf16[4,256]) -> f32[32,256] {
  %stack = bf16[3,16,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(1)
  %q = bf16[4,256]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %kernel = bf16[1,16,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%stack, %zero, %zero, %zero), \
dynamic_slice_sizes={1,16,256}
  %flat = bf16[16,256]{1,0:T(8,128)(2,1)} bitcast(%kernel)
  %again = bf16[16,256]{1,0:T(8,128)(2,1)} all-gather(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %out = f32[32,256]{1,0:T(8,128)} convolution(%x, %flat), dim_labels=bf_io->bf, metadata={op_name="step/dot"}
}

%body (state: (s32[], bf16[3,16,256])) -> (s32[], bf16[3,16,256]) {
  %state.2 = (s32[]{:T(128)}, bf16[3,16,256]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %stack.1 = bf16[3,16,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.2), index=1
  %count.1 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %part = bf16[4,256]{1,0:T(8,128)(2,1)S(1)} broadcast(%stack.1), dimensions={}
  %rows = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} broadcast(%stack.1), dimensions={}
  %run = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} fusion(%part), kind=kCustom, calls=%begin
  %product = f32[32,256]{1,0:T(8,128)} fusion(%stack.1, %rows, %part), kind=kOutput, calls=%multiply, \
metadata={op_name="step/dot"}, backend_config={"window_config":{"estimated_cycles":"70"}}
  ROOT %next = (s32[]{:T(128)}, bf16[3,16,256]{2,1,0:T(8,128)(2,1)}) tuple(%count.1, %stack.1)
}

%scatter (g: f32[16,256]) -> f32[4,256] {
  %g = f32[16,256]{1,0:T(8,128)} parameter(0)
  %sum = f32[16,256]{1,0:T(8,128)} all-reduce(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %start = s32[]{:T(128)} constant(0)
  ROOT %own = f32[4,256]{1,0:T(8,128)S(1)} dynamic-slice(%sum, %start, %start), dynamic_slice_sizes={4,256}
}

ENTRY %main (stack: bf16[3,16,256]) -> (bf16[3,16,256], f32[16,256]) {
  %entry = bf16[3,16,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %none = s32[]{:T(128)} constant(0)
  %gradient = f32[16,256]{1,0:T(8,128)} broadcast(%none), dimensions={}
  %begun = (s32[]{:T(128)}, bf16[3,16,256]{2,1,0:T(8,128)(2,1)}) tuple(%none, %entry)
  %loop = (s32[]{:T(128)}, bf16[3,16,256]{2,1,0:T(8,128)(2,1)}) while(%begun), condition=%condition, body=%body
  %scattered = f32[4,256]{1,0:T(8,128)S(1)} fusion(%gradient), kind=kCustom, calls=%scatter
  %token = token[] after-all()
  %sent = (bf16[64]{0:T(512)}, u32[], token[]) send(%scattered, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %done = token[] send-done(%sent), channel_id=2, is_host_transfer=true
  %ahead = (f32[16,256]{1,0:T(8,128)S(1)}, f32[16,256]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%gradient)
  %there = f32[16,256]{1,0:T(8,128)S(1)} copy-done(%ahead)
  %final = bf16[3,16,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  ROOT %result = (bf16[3,16,256]{2,1,0:T(8,128)(2,1)}, f32[16,256]{1,0:T(8,128)}) tuple(%final, %gradient)
}
"""
PRODUCT = 2 * 32 * 256 * 16


def test_arrays_take_whole_tiles_and_say_in_which_memory_they_are():
    ones = hlo.computations(STEP)["multiply"]
    x = next(one for one in ones if one.name == "x").results[0]
    assert (x.sizes, x.stored, x.space) == ((32, 16), (32, 128), 0)
    assert x.bytes == 2 * 32 * 128
    q = next(one for one in ones if one.name == "q").results[0]
    assert (q.stored, q.space) == ((8, 256), 1)


def test_a_scan_runs_as_often_as_its_condition_says():
    program = read_program(STEP, MESH)
    assert program.unknown_loops == 0
    assert program.product_flops == 3 * PRODUCT
    assert [(one.origin, one.dtypes, one.precision) for one in program.products] == [("step/dot", ("bf16", "bf16"), "")]


def test_links_of_a_chain_are_one_collective_beside_other_work():
    scatter, sent, gather = read_program(STEP, MESH).collectives
    assert (gather.kind, gather.axes, gather.times, gather.overlaps) == ("all-gather", ("fsdp",), 3, True)
    assert gather.bytes_sent == 3 * (2 * 16 * 256) * 3 / 4
    # A sum of which each device keeps its part.
    assert (scatter.kind, scatter.shapes, scatter.overlaps) == ("reduce-scatter", (("f32", (4, 256)),), False)
    assert scatter.bytes_sent == 3 * 4 * 4 * 256
    assert (sent.kind, sent.bytes_sent, sent.overlaps) == ("send", 2 * 64, True)


def test_a_chain_that_begins_before_a_loop_runs_once():
    begin = next(line for line in STEP.splitlines() if line.startswith("  %run = "))
    before = STEP.replace(f"{begin}\n", "").replace(
        "  %none = ", f"{begin.replace('%part', '%gradient')}\n  %none = ", 1
    )
    (gather,) = (one for one in read_program(before, MESH).collectives if one.kind == "all-gather")
    assert (gather.times, gather.overlaps) == (1, True)


def test_the_main_memory_is_read_by_the_slice_and_not_for_what_is_on_the_chip():
    works = {work.name: work for work in read_program(STEP, MESH).works}
    product = works["product"]
    assert (product.times, product.flops, product.cycles, product.beside) == (3, PRODUCT, 70, False)
    # One kernel of the stack is read and the product written; the rows are on the chip.
    assert product.hbm_bytes == 2 * 16 * 256 + 4 * 32 * 256
    assert (works["ahead"].hbm_bytes, works["ahead"].beside) == (4 * 16 * 256, True)


def test_bounds_are_those_of_hand_arithmetic():
    program = read_program(STEP, MESH)
    topology = Topology("v5e", "2x2", slices=2)
    found = roofline(program, topology, model_flops=8 * 3 * PRODUCT)
    moved = sum(work.times * work.hbm_bytes for work in program.works)
    ici = 3 * (2 * 16 * 256) * 3 / 4 + 3 * 4 * 4 * 256
    seconds = {limit.name: limit.seconds for limit in found.limits}
    assert seconds == pytest.approx(
        {
            "matrix products": 3 * PRODUCT / 197e12,
            "HBM": moved / 819e9,
            "ICI": ici / 200e9,
            "DCN": 2 * 64 / 3.125e9,
        }
    )
    # Each instruction at its own limit, here HBM, and then the sum over devices, which nothing runs beside.
    serial = sum(work.times * work.hbm_bytes for work in program.works if not work.beside) / 819e9
    assert found.serial == pytest.approx(serial + 3 * 4 * 4 * 256 / 200e9)
    assert found.seconds == max(found.serial, *seconds.values())
    assert found.mfu == pytest.approx(8 * 3 * PRODUCT / (8 * 197e12) / found.seconds)


def test_memory_lives_from_the_instruction_that_makes_it_to_the_last_that_reads_it():
    found = life(STEP)
    held = found.held()
    gradient = next(buffer for buffer in found.buffers if buffer.name == "gradient")
    assert gradient.bytes == 4 * 16 * 256
    assert (gradient.first, gradient.last) == (2, len(held) - 1)
    # The stack is an argument that is returned in its place.
    assert not [buffer for buffer in found.buffers if buffer.shape == "bf16[3,16,256]" and buffer.bytes]
    # Within the loop: a product.
    assert found.within == {4: 4 * 32 * 256}
    assert held[4] == gradient.bytes + found.within[4]


@pytest.mark.parametrize(
    ("window", "length", "kernel", "results"),
    [
        ("window={size=3 pad=1_1}", 7, 3, 7),
        ("window={size=3 stride=2}", 9, 3, 4),
        ("window={size=2 rhs_dilate=3}", 8, 2, 5),
        ("window={size=4 stride=3 lhs_dilate=4}", 4, 4, 4),  # a batch of products
    ],
)
def test_a_window_counts_what_meets_an_element(window, length, kernel, results):
    text = f"x, y), {window}, dim_labels=b0f_0io->b0f"
    arrays = [hlo.Array("f32", (2, length, 5)), hlo.Array("f32", (kernel, 5, 3)), hlo.Array("f32", (2, results, 3))]
    one = hlo.Instruction("c", "convolution", (arrays[2],), ("x", "y"), text, True)
    fields = dict(part.split("=") for part in window[len("window={") : -1].split())
    stride, spread, apart = (int(fields.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(fields.get("pad", "0_0").split("_")[0])
    # The slow count: an input with holes, and a window that moves over it.
    holes = np.zeros(length * spread + 50)
    holes[low : low + length * spread : spread] = 1
    pairs = sum(holes[number * stride + place * apart] for number in range(results) for place in range(kernel))
    assert hlo.product_flops(one, arrays[:2]) == 2 * 2 * 5 * 3 * pairs
    assert math.isfinite(pairs)
    assert pairs > 0
