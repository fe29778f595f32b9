"""What contrastive losses never hold, and how keys reach the queries of other devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from tests.losses.contrastive_cases import make, mesh_of, split_rows

pytestmark = pytest.mark.slow

BLOCK = 16
PSEUDO_POSITIVES = functools.partial(SigmoidLoss, pseudo_positives=0.1)
SMOOTHED = functools.partial(SoftmaxLoss, label_smoothing=0.1)
CASES = [
    (loss, kind)
    for loss in (SoftmaxLoss, SigmoidLoss, PSEUDO_POSITIVES, SMOOTHED)
    for kind in ("deterministic", "both sides noisy")
]


def lowered(loss, kind, b, num_devices):
    """The program of value and gradient, not compiled yet."""
    mesh = mesh_of(num_devices)
    arguments = split_rows((make(kind, b=b), jnp.ones(b, bool)), mesh)
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss)).lower(*arguments)


def largest_array(program):
    """The number of elements of the largest array in the text of a program."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", program.as_text())
    return max(math.prod(int(size) for size in shape.split("x")[:-1]) for shape in shapes)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("form", "num_devices", "loss", "kind"),
    [
        # Each pair of a form, a loss, a kind of queries and a number of devices.
        (form, num_devices, *case)
        for case, form, num_devices in zip(
            CASES,
            ("gather", "ring", "ring", "gather", "ring", "gather", "gather", "ring"),
            (1, 8, 1, 8, 8, 1, 1, 8),
            strict=True,
        )
    ],
)
def test_no_array_of_the_program_has_the_size_of_the_batch_squared(form, num_devices, loss, kind):
    """Each of eight devices has 16 examples, and scores six or two at a time."""
    assert largest_array(lowered(loss(form, 6), kind, 128, num_devices)) <= 8 * 6 * 128 < 128 * 128


@pytest.mark.parametrize(("loss", "kind"), [CASES[0], CASES[-1]])
def test_the_dense_form_holds_the_whole_matrix(loss, kind):
    """What the test above would find in the others."""
    assert largest_array(lowered(loss("dense"), kind, 128, 1)) >= 128 * 128


@pytest.mark.parametrize(
    ("loss", "kind", "growth"),
    [
        (SoftmaxLoss("gather", BLOCK), "deterministic", (1.5, 2.3)),
        (SoftmaxLoss("ring", BLOCK), "one side noisy", (1.5, 2.3)),
        (SigmoidLoss("gather", BLOCK), "one side noisy", (1.5, 2.3)),
        (SoftmaxLoss("dense"), "deterministic", (3.5, 4.5)),
    ],
    ids=str,
)
def test_doubling_the_batch_doubles_the_memory_of_compiled_programs_but_of_the_dense_form(loss, kind, growth):
    sizes = []
    for b in (512, 1024):
        analysis = lowered(loss, kind, b, 1).compile().memory_analysis()
        assert analysis is not None
        sizes.append(analysis.temp_size_in_bytes)
    assert growth[0] < sizes[1] / sizes[0] < growth[1], sizes


@pytest.mark.devices
@pytest.mark.parametrize(
    ("form", "loss", "kind"),
    [
        ("ring", SoftmaxLoss, "deterministic"),
        ("ring", SigmoidLoss, "both sides noisy"),
        ("ring", PSEUDO_POSITIVES, "both sides noisy"),
        ("ring", SMOOTHED, "both sides noisy"),
        ("gather", SoftmaxLoss, "deterministic"),
        ("gather", SigmoidLoss, "both sides noisy"),
    ],
)
def test_the_ring_passes_keys_from_device_to_device_and_gathers_none(form, loss, kind):
    program = str(lowered(loss(form, BLOCK), kind, 32, 8).compile().as_text())
    has, has_not = ("collective-permute", "all-gather") if form == "ring" else ("all-gather", "collective-permute")
    assert has in program
    assert has_not not in program
