"""Stage I of UViM (Kolesnikov et al. 2022): a VQ-VAE of masks, whose words follow the vectors that they replace."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.losses.base import masked_mean, weights
from lit_het.losses.masks import pixel_loss
from lit_het.random import Keys
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.towers.codebook import Counted, counted, followed
from lit_het.towers.oracle import MaskLogits, Oracle, dropped
from lit_het.types import Batch, Metrics, Params


class MaskOracle(nnx.Module):
    """The oracle; the name of its attribute begins parameter paths."""

    oracle: Oracle

    def __init__(self, config: MaskOracleConfig, rngs: nnx.Rngs):
        self.oracle = config.oracle.build(rngs)


class MaskOracleTask(Task[MaskOracleConfig, MaskOracle]):
    """The task of a `MaskOracleConfig`."""

    def __init__(self, config: MaskOracleConfig):
        super().__init__(config, MaskOracle)

    def forward(self, model: MaskOracle, batch: Batch, keys: Keys) -> Forward:
        """Returns the loss of all pixels, see `Task`; its metrics hold what the words follow, see `advanced`."""
        assert batch.image is not None
        assert batch.masks is not None
        code = model.oracle.encode(batch.masks, batch.image)
        words = dropped(code.words, self.config.code_dropout, keys("code_dropout"))
        logits = model.oracle.decode(words, batch.image)
        loss, metrics = _loss(logits, model.oracle.in_patches(batch.masks), weights(batch.valid, batch.weight))
        distances = jnp.mean((code.vectors - jax.lax.stop_gradient(code.words)) ** 2, axis=(1, 2))
        commitment = masked_mean(distances, batch.valid)
        found = counted(code.vectors, code.numbers, batch.valid, self.config.oracle.codebook.num_words)
        metrics |= {
            "commitment_loss": commitment,
            "unused_words": jnp.mean(found.counts == 0),
            "most_frequent_word": found.counts.max() / jnp.maximum(found.counts.sum(), 1),
            "codebook": found,
        }
        return Forward(loss + self.config.commitment * commitment, metrics, {})

    def advanced(self, params: Params, metrics: Any, keys: Keys) -> tuple[Params, Metrics]:
        """Returns the parameters with the words after a batch, see `Task`."""
        metrics, found = {**metrics}, metrics["codebook"]
        del metrics["codebook"]
        oracle = params.get("oracle", {})
        if "codebook" not in oracle:  # locked
            return params, metrics
        before = Counted(**oracle["codebook"])
        after = followed(before, found, self.config.oracle.codebook, keys("codebook"))
        return {**params, "oracle": {**oracle, "codebook": after._asdict()}}, metrics


def _loss(
    logits: MaskLogits, labels: Int[Array, "b n p 2"], share: Float[Array, " b"]
) -> tuple[Float[Array, ""], dict[str, Any]]:
    """Returns the sum of both losses of pixels, and metrics."""
    classes = pixel_loss(logits.classes, labels[..., 0], share)
    instances = pixel_loss(logits.instances, labels[..., 1], share)
    return classes.loss + instances.loss, {
        "class_loss": classes.loss,
        "instance_loss": instances.loss,
        "class_accuracy": classes.accuracy,
        "instance_accuracy": instances.accuracy,
    }
