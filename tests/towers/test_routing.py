"""Routing equals what V-MoE's own code recorded, and hand arithmetic."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.towers import routing

GOLDEN = Path(__file__).parents[1] / "golden"
route = jax.jit(routing.route, static_argnums=(1, 3))
select = jax.jit(routing.select, static_argnums=1, static_argnames="batch_priority")


def recorded(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays), json.loads(arrays["__meta__"].tobytes()) if "__meta__" in arrays else {}


def test_the_capacity_is_that_of_v_moe():
    table, _ = recorded("compute_capacity")
    ours = ~table["is_round"] & (table["multiple_of"] == 4) & (table["capacity"] > 0)
    assert ours.sum() > 500
    for row in np.flatnonzero(ours):
        tokens, experts, factor = (
            int(table[key][row]) for key in ("num_tokens", "num_experts", "capacity_factor_x100")
        )
        assert routing.capacity(tokens, 1, experts, factor / 100) == table["capacity"][row], row


def test_capacity_by_hand():
    # 196 tokens, 2 choices, 32 experts: 1.05 · 392 / 32 = 12.86, hence 13, hence 16 in fours.
    assert routing.capacity(196, 2, 32, 1.05) == 16
    assert routing.capacity(64, 1, 8, 1.0) == 8


@pytest.mark.parametrize("name", ["K1_vanilla_even_cap1", "K2_bpr_tight", "K2_vanilla_ties", "K4_bpr_skew_cap1"])
def test_experts_slots_and_weights_are_those_of_v_moe(name):
    golden, meta = recorded(f"dispatch_{name}")
    gates, slots = golden["gates"], meta["capacity_resolved"]
    choices = select(gates, meta["K"], batch_priority=meta["batch_priority"])
    expert, slot = golden["indices"][..., 0], golden["indices"][..., 1]
    np.testing.assert_array_equal(choices.expert, expert)
    # Positions of dropped tokens are of no consequence.
    has_slot = slot < slots
    np.testing.assert_array_equal(np.asarray(choices.slot)[has_slot], slot[has_slot])
    np.testing.assert_array_equal(np.asarray(choices.slot) < slots, has_slot)
    places = jax.jit(functools.partial(routing.places, num_experts=gates.shape[-1], num_slots=slots))
    place, weight = (np.asarray(array) for array in places(choices))
    np.testing.assert_array_equal(place, golden["einsum_dispatch_weights"])
    np.testing.assert_allclose(weight, golden["einsum_combine_weights"], atol=1e-7)

    inputs = np.einsum("gtd,gtec->egcd", golden["x"], place)
    scale, shift = (golden[f"expert_{x}"][:, None, None, None] for x in ("scale", "shift"))
    combined = np.einsum("egcd,gtec->gtd", inputs * scale + shift, weight)
    np.testing.assert_allclose(combined, golden["combined"], rtol=1e-5, atol=1e-6)


def test_first_choices_take_slots_before_second_ones():
    # Token 0 prefers expert 0, token 1 expert 1; each is the other's second choice.
    choices = select(np.array([[[0.6, 0.4], [0.3, 0.7]]], np.float32), 2)
    np.testing.assert_array_equal(choices.expert, [[[0, 1], [1, 0]]])
    np.testing.assert_array_equal(choices.slot, [[[0, 1], [0, 1]]])


@pytest.mark.parametrize(("batch_priority", "slots"), [(False, [0, 1, 2]), (True, [2, 0, 1])])
def test_batch_priority_gives_the_slot_to_the_token_with_the_largest_gate(batch_priority, slots):
    gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.9, 0.1]]], np.float32)
    np.testing.assert_array_equal(select(gates, 1, batch_priority=batch_priority).slot, np.reshape(slots, (1, 3, 1)))


@pytest.mark.parametrize("batch_priority", [False, True])
def test_padding_changes_nothing_for_the_tokens_that_are_present(batch_priority):
    logits, noise = np.random.default_rng(0).normal(size=(2, 2, 9, 4)).astype(np.float32)
    present = np.array([True, False, True, True, False, True, True, False, True])
    both = np.array([present] * 2)
    padded = route(logits, 2, noise, 1.0, both)
    alone = route(logits[:, present], 2, noise[:, present], 1.0)
    np.testing.assert_allclose(padded.importance_loss, alone.importance_loss, rtol=1e-6)
    np.testing.assert_allclose(padded.load_loss, alone.load_loss, rtol=1e-6)
    choices = select(padded.probability, 2, batch_priority=batch_priority, present=both)
    expected = select(alone.probability, 2, batch_priority=batch_priority)
    for field in ("expert", "slot", "gate"):
        np.testing.assert_array_equal(np.asarray(getattr(choices, field))[:, present], getattr(expected, field))
    assert (np.asarray(choices.slot)[:, ~present] >= 9).all()
    assert (np.asarray(choices.gate)[:, ~present] == 0).all()


def test_a_group_of_only_padding_has_no_loss():
    gates = route(np.ones((1, 3, 2), np.float32), 1, np.zeros((1, 3, 2), np.float32), 1.0, np.zeros((1, 3), bool))
    assert (gates.importance_loss, gates.load_loss) == (0, 0)


def with_gshard(gates, weight):
    """Returns gates with GShard's loss, of the recorded sum of three the one that is not ours, in the importance."""
    e = gates.probability.shape[-1]
    share = jax.nn.one_hot(jnp.argmax(gates.probability, axis=-1), e).mean(axis=1)
    gshard = jnp.mean(e**2 * jnp.mean(share * gates.probability.mean(axis=1), axis=-1))
    return dataclasses.replace(gates, importance_loss=gates.importance_loss + weight * gshard)


@pytest.mark.parametrize("name", ["E4_K1_noisy", "E8_K2_det", "e3_M2_E8_K1_noisy"])
def test_gates_and_auxiliary_losses_are_those_of_v_moe(name):
    golden, meta = recorded(f"router_{name}")
    m, x, kernel = meta.get("ensemble_size", 1), golden["x"], golden["kernel"]
    g, t, d = x.shape
    noise = golden.get("noise")
    if noise is not None:  # e3 recorded [member, group, ...]
        noise = jnp.asarray(noise.swapaxes(0, 1).reshape(g * m, t // m, -1) if m > 1 else noise)
    weights = {kind: meta[f"{kind}_loss_weight"] for kind in ("importance", "load", "gshard")}

    def total(x, kernel):
        by_member = x.reshape(g, t // m, m, d)
        logits = jnp.einsum("gtmd,dme->gmte", by_member, kernel.reshape(d, m, -1)).reshape(g * m, t // m, -1)
        gates = routing.route(logits, meta["num_selected_experts"], noise, meta["noise_std"])
        losses = with_gshard(gates, weights["gshard"] / weights["importance"])
        return weights["importance"] * losses.importance_loss + weights["load"] * losses.load_loss, gates

    with jax.default_matmul_precision("highest"):
        (_, gates), slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(x, kernel)
    expected = golden["gates"]
    if m > 1:  # the recorded matrix is zero outside a member's experts
        expected = expected.reshape(g, t // m, m, m, -1)
        expected = np.stack([expected[:, :, i, i] for i in range(m)], axis=1).reshape(g * m, t // m, -1)
    np.testing.assert_allclose(gates.probability, expected, atol=1e-6)
    np.testing.assert_allclose(gates.importance_loss, golden["metrics/importance_loss"].mean(), rtol=1e-5)
    load = golden["metrics/load_loss"].mean() if noise is not None else 0.0
    np.testing.assert_allclose(gates.load_loss, load, rtol=1e-5)
    np.testing.assert_allclose(slopes[0], golden["grad_aux_x"], atol=1e-4 * np.abs(golden["grad_aux_x"]).max())
    np.testing.assert_allclose(slopes[1], golden["grad_aux_kernel"], rtol=1e-4, atol=1e-5)
