"""Shared by tests of experts: what one block's experts make of tokens, and the same in NumPy, expert by expert."""

import jax
import numpy as np
from flax import nnx

from lit_het.towers.experts import ExpertKeys, Experts
from lit_het.towers.transformer import EncoderConfig
from tests.towers.models import drawn
from tests.towers.test_forms import ACTIVATIONS, dense

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)


def mixture(config, tokens, *, apart=False):
    """Returns what one block's experts make of tokens ``[b n d]``, figures of the routing, and the parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, 8, ENCODER.build_mlp, nnx.Rngs(0))))
    params = drawn(nnx.to_pure_dict(state), 0.5, seed=1)
    apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x, len(tokens), ExpertKeys(), apart=apart))
    output, figures = apply(params, tokens.reshape(-1, 8).astype(np.float32))
    return np.asarray(output).reshape(-1, *tokens.shape[1:]), figures, params


def expert(params, number, token):
    """Returns what an expert makes of a token, in float64."""
    layers = jax.tree.map(lambda leaf: leaf[number].astype(np.float64), params["experts"])
    return dense(layers["down"], ACTIVATIONS["gelu_tanh"](dense(layers["up"], token)))


def selected(params, subset, token, num_selected):
    """Returns numbers and gates of the K experts of a subset with the largest gates, in float64."""
    logits = token @ params["router"]["kernel"].astype(np.float64)[:, subset]
    gates = np.exp(logits) / np.exp(logits).sum()
    return [(subset[e], gates[e]) for e in np.argsort(-gates, kind="stable")[:num_selected]]


def contributions(params, subset, token, num_selected, expert=expert):
    """Returns g_e MLP_e(token) of these experts."""
    chosen = selected(params, subset, token, num_selected)
    return np.stack([gate * expert(params, number, token) for number, gate in chosen])
