"""LiT (Zhai et al. 2022): a locked image tower, a trainable text tower, a contrastive head and loss."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from lit_het import sharding
from lit_het.heads.base import ContrastiveHead
from lit_het.losses.base import finite, masked_mean, weights
from lit_het.random import Keys
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import ImageClassifier
from lit_het.types import Batch, EmbeddingSamples, LogitSamples, Metrics, Params, Queries, TowerOutput

# JAX's arrays or NumPy's.
_Rows = TypeVar("_Rows", jax.Array, np.ndarray)
# Pairs whose noise is measured in each step.
_MEASURED_PAIRS = 16


class TwoTowers(nnx.Module):
    """Both towers and the head; the names of its attributes begin parameter paths."""

    head: ContrastiveHead

    def __init__(self, config: ContrastiveConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.text_tower = config.text_tower.build(rngs)
        self.head = config.build_head(rngs)


class ContrastiveTask(Task[ContrastiveConfig, TwoTowers]):
    """The task of a `ContrastiveConfig`."""

    def __init__(self, config: ContrastiveConfig):
        super().__init__(config, TwoTowers)
        self.has_image_noise = config.head.has_image_noise
        self.antithetic = config.head.antithetic
        self.features = FeatureExtractor(config.image_tower)
        self.num_predictions = config.num_keys

    def forward(self, model: TwoTowers, batch: Batch, keys: Keys) -> Forward:
        """Returns the contrastive loss of the batch, see `Task`."""
        image, text, outputs = self._embeddings(model, batch, keys)
        samples = _by_image(model.head(image, text, keys("noise")), self.config.num_keys)
        loss = self.config.loss(samples, batch.valid, batch.ids, batch.weight, *filter(None, [batch.mixed]))
        metrics, auxiliary_losses = {"temperature": samples.temperature}, []
        # Heads of images with several members have no auxiliary losses, and the noise of the first is measured.
        first = image.reshape(len(text), -1, image.shape[1])[:, 0]
        for name, values in model.head.auxiliary_losses(first, text, keys("dropout")).items():
            metrics[name] = masked_mean(values, batch.valid)
            auxiliary_losses.append(jnp.sum(weights(batch.valid, batch.weight) * values))
        metrics |= _noise_metrics(model.head, first, text, batch.valid)
        return Forward(loss, metrics, outputs, image, text, auxiliary_losses)

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Returns the model as a classifier over texts β with the logits ``(α + ε) · β / τ``, of each key of an image.

        With noise on the image only, as in the ablation of HET-XL App. M; the paper evaluates without noise.
        """
        head = self.model(params).head

        def logits(image: Float[Array, "n d"], key: Key[Array, ""] | None, num_samples: int) -> LogitSamples:
            assert classes is not None, "this quantity needs the embeddings of class names"
            return head.logits(image, classes, key, num_samples)

        def embeddings(members: Float[Array, "b m d"]) -> Float[Array, "b key"]:
            b, m, d = members.shape
            keys = head.image_key(members.reshape(b * m, d))
            return keys if m == 1 else head.mean_text_key(keys.reshape(b, m, -1))

        return ImageClassifier(
            inputs=self.features.embedding,
            logits=logits,
            log_probabilities=jax.nn.log_softmax,
            scores=lambda logits: logits,
            # As in the loss, where the keys of all members are right answers.
            mean_scores=lambda scores: jax.nn.logmeanexp(scores, axis=1),
            embeddings=embeddings,
            noise_norm=head.image_noise_norm,
            noise_spectrum=head.image_spectrum,
            pair_bias=0.0 if head.bias is None else head.bias[...],
        )

    def encode_text(self, params: Params, text: Int[Array, "b l"]) -> Float[Array, "b d"]:
        """Returns noiseless embeddings, the head's keys."""
        model = self.model(params)
        return model.head.text_key(model.text_tower(text).embedding)

    def mean_text_key(self, params: Params, keys: Float[Array, "k t d"]) -> Float[Array, "k d"]:
        """Returns the embedding of each class name from those of its t prompts."""
        return self.model(params).head.mean_text_key(keys)

    def embeddings_of(self, keys: _Rows) -> _Rows:
        """Returns the unit embeddings of keys, whose further entries only a posterior of their layer needs.

        Those of Gaussian embeddings stay: scores are made of them.
        """
        return keys[..., : self.config.image_tower.embedding_size] if self.config.head.extends_keys else keys

    def _embeddings(
        self, model: TwoTowers, batch: Batch, keys: Keys
    ) -> tuple[Float[Array, "bm d"], Float[Array, "b d"], dict[str, TowerOutput]]:
        """Returns the embeddings of images and of texts, and all outputs of the towers that computed them.

        Those of the members of an image are adjacent.
        """
        assert batch.text is not None
        outputs = {}
        if batch.text_embedding is None:
            outputs["text"] = self.tower_output(model, "text_tower", batch.text, keys("text_tower_routing"))
            text = outputs["text"].embedding
        else:
            text = batch.text_embedding.astype(jnp.float32)
        if batch.image_embedding is None:
            outputs["image"] = self.tower_output(model, "image_tower", batch.image, keys("image_tower_routing"))
            image = outputs["image"].embedding
        else:
            image = self.features.embedding(batch.image_embedding.astype(jnp.float32))
        of_members = jnp.repeat(batch.valid, self.config.num_keys, axis=0)
        return finite(image, of_members), finite(text, batch.valid), outputs


def _by_image(samples: EmbeddingSamples, num_keys: int) -> EmbeddingSamples:
    """Returns what the head makes of the members of each image, which are adjacent rows, as keys and queries of it.

    The M members are further samples of a query: its loss is the log of the mean probability over both. Every member is
    a key, so that the probability of an image is the sum over its keys.
    """
    if num_keys == 1:
        return samples
    image, queries = samples.image, samples.image_queries
    if queries is not None:
        queries = Queries(queries.materialize().reshape(-1, num_keys * queries.num_samples, image.shape[1]))
    return dataclasses.replace(samples, image=image.reshape(-1, num_keys, image.shape[1]), image_queries=queries)


def _noise_metrics(
    head: ContrastiveHead, image: Float[Array, "n d"], text: Float[Array, "n d"], valid: Bool[Array, " n"]
) -> Metrics:
    """Returns the norms of the noise of some pairs, and what shows its form."""
    image, text, valid = (_some_rows(x) for x in (image, text, valid))
    found = {"image_noise_norm": head.image_noise_norm(image), "text_noise_norm": head.text_noise_norm(text)}
    found |= head.noise_metrics(image, text, valid)
    return {name: masked_mean(values, valid) for name, values in found.items()}


def _some_rows(x: Shaped[Array, "b *rest"]) -> Shaped[Array, "n *rest"]:
    """Returns evenly spread rows of a batch: records average steps, so that a part of each batch tells as much."""
    count = max(_MEASURED_PAIRS, sharding.num_automatic_shards())
    if len(x) % count:
        return x
    # The first row of each part: a device has whole parts, where a slice with a step would move rows between devices.
    return sharding.as_batch(x.reshape(count, -1, *x.shape[1:])[:, 0])
