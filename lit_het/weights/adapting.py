"""Parameters of a trained image tower for one of another form: with experts, rank-one members or several inputs.

The authors of e3 start all their baselines from checkpoints of ViT and V-MoE in this way (e3 App. B, H.3).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import ViTConfig


def source_form(theirs: Any, ours: Any) -> Any:
    """Returns our tower in the form of the source: without experts, with one input or class token, as theirs is."""
    experts = None if theirs.encoder.experts is None else ours.encoder.experts
    single: dict[str, Any] = {"num_inputs": 1, "inputs_as": "channels"} if theirs.num_inputs == 1 else {}
    single |= {"num_class_tokens": 1} if theirs.num_class_tokens == 1 else {}
    return dataclasses.replace(ours.with_encoder(experts=experts), **single)


def is_adapted(theirs: Any, ours: Any) -> bool:
    """Returns whether a source has the parameters of our tower in another form; only ViTs have several."""
    if not isinstance(theirs, ViTConfig) or not isinstance(ours, ViTConfig):
        return False
    experts, form = ours.encoder.experts, source_form(theirs, ours)
    is_permuted = experts is not None and experts.permutation is not None
    return is_permuted or form != ours


def adapted(
    params: Mapping[str, Float[np.ndarray, "..."]], theirs: ViTConfig, ours: ViTConfig
) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns the parameters of our tower that those of the source determine; others, such as routers, are absent.

    Args:
        params: in the shapes of ``source_form(theirs, ours)``, by their paths within the tower.
        theirs: the source.
        ours: the tower that starts from them.
    """
    found, experts = dict(params), ours.encoder.experts
    if experts is not None and theirs.encoder.experts is None:
        found = {
            path: array
            for old, value in found.items()
            for path, array in _of_blocks(old, value, experts, ours.encoder.depth).items()
        }
    elif experts is not None and experts.permutation is not None:
        found = {path: _permuted(path, array, experts) for path, array in found.items()}
    if theirs.num_class_tokens < ours.num_class_tokens and "class_token" in found:
        found["class_token"] = np.tile(found["class_token"], (ours.num_class_tokens, 1))
    if theirs.num_inputs < ours.num_inputs and ours.inputs_as == "patches":
        if "positions" in found:
            found["positions"] = np.tile(found["positions"], (ours.num_inputs, 1))
    elif theirs.num_inputs < ours.num_inputs and ours.stem is not None:
        if "stem/root/conv/kernel" in found:  # its scale has no effect
            found["stem/root/conv/kernel"] = np.tile(found["stem/root/conv/kernel"], (1, 1, ours.num_inputs, 1))
    elif theirs.num_inputs < ours.num_inputs and "patches/kernel" in found:
        # Repeated for each input, over their number, so that equal inputs give the same tokens (e3 App. B.3).
        kernel = found["patches/kernel"].reshape(-1, 3, ours.encoder.width)
        inputs = np.tile(kernel, (1, ours.num_inputs, 1)) / ours.num_inputs
        found["patches/kernel"] = inputs.reshape(-1, ours.encoder.width)
    return found


def _of_blocks(
    path: str, array: Float[np.ndarray, "..."], experts: ExpertsConfig, depth: int
) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns the parts of a parameter of all blocks that belong to plain blocks and to those with experts."""
    prefix = "encoder/blocks/"
    if not path.startswith(prefix):
        return {path: array}
    numbers, rest = experts.block_numbers(depth), path.removeprefix(prefix)
    plain = [number for number in range(depth) if number not in numbers]
    parts = {path: array[plain]} if plain else {}
    of_experts = array[list(numbers)]
    if rest.startswith("mlp/"):
        layer = rest.removeprefix("mlp/")
        # Members of rank one share the kernel (e3 App. B.2). Experts are copies of the MLP at first (Komatsuzaki et
        # al., "Sparse upcycling", ICLR 2023).
        if experts.rank_one is None or not layer.endswith("kernel"):
            of_experts = np.repeat(of_experts[:, None], experts.num_experts, axis=1)
        rest = f"mixture/{'experts' if experts.rank_one is None else 'rank_one'}/{layer}"
    return {**parts, f"encoder/expert_blocks/{rest}": of_experts}


def _permuted(path: str, array: Float[np.ndarray, "..."], experts: ExpertsConfig) -> Float[np.ndarray, "..."]:
    """Returns a parameter with the experts of each block in a random order, and the columns of their router."""
    is_shared = "/rank_one/" in path and path.endswith("kernel")
    if "/mixture/" not in path or is_shared:
        return array
    axis = array.ndim - 2 if "/router/" in path else 0
    random = np.random.default_rng(experts.permutation)
    orders = [random.permutation(experts.num_experts) for _ in range(len(array))]
    return np.stack([np.take(x, order, axis) for x, order in zip(array, orders, strict=True)])
