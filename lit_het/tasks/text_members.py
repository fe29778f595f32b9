"""Several text towers and heads on one locked image tower, a deep ensemble trained in one run.

Lakshminarayanan, Pritzel and Blundell, "Simple and scalable predictive uncertainty estimation using deep ensembles",
NeurIPS 2017. The members' parameters are stacked along a leading axis. Each member has its own initial parameters and
noise, and sees the embeddings of images that are computed once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.base import Progress
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.quantities import ImageClassifier
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.types import Batch, LogitSamples, Metrics, Params, TowerOutput

_SHARED = "image_tower"


class TextMembersTask(ContrastiveTask):
    """The task of a `ContrastiveConfig` with ``text_members`` > 1: that of one member, done for each of them.

    Embeddings of texts and of images are those of all members side by side, each divided by √M: unit vectors, whose
    inner product is the mean of the members' cosines.
    """

    def __init__(self, config: ContrastiveConfig):
        super().__init__(config)
        self._one = dataclasses.replace(config, text_members=1).build()
        self.num_members = self.num_predictions = config.text_members
        self.shapes = jax.eval_shape(self.initialize, jax.random.key(0))

    @property
    def one(self) -> ContrastiveTask:
        """The task of each member alone."""
        return self._one

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters; those of the first member are those of a single one with this key."""
        found = [self.one.initialize(_of_member(key, number)) for number in range(self.num_members)]
        stacked = jax.tree.map(lambda *of_members: jnp.stack(of_members), *map(_own, found))
        return {_SHARED: found[0][_SHARED], **stacked}

    def member(self, params: Params, number: int) -> Params:
        """Returns the parameters of one member, as those of `one`."""
        return {_SHARED: params[_SHARED], **jax.tree.map(lambda x: x[number], _own(params))}

    def members(self, params: Params) -> list[Params]:
        """Returns the parameters of each member."""
        return [self.member(params, number) for number in range(self.num_members)]

    def check_trained(self) -> None:
        """Checks that the image tower is locked, and nothing else.

        Raises:
            UserError: members would not share the embeddings of images, or not have text towers of their own.
        """
        locked, trainable = parameters.partition(self.shapes, self.locked)
        if locked.keys() != {_SHARED} or _SHARED in trainable:
            raise UserError(
                f"task.text_members = {self.num_members} shares the embeddings of a locked image tower and trains all "
                "else: leave task.locked at 'image_tower/.*', or set task.text_members to 1"
            )

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the sum of the members' losses, so that each has the gradient that it has alone, and mean metrics."""
        batch = self._with_features(params, batch)
        # One member after another: on CPUs `jax.vmap` was no faster, and their programs are those of single runs. The
        # gradient of an unstacked array is stacked once, where M slices would add M arrays of its size.
        apart = jax.tree.map(jnp.unstack, _own(params))
        found = []
        for number in range(self.num_members):
            own = jax.tree.map(lambda arrays, i=number: arrays[i], apart, is_leaf=lambda x: isinstance(x, tuple))
            of_member = {_SHARED: params[_SHARED], **own}
            found.append(self.one.loss(of_member, batch, Keys(_of_member(keys.base, number))))
        losses = jnp.stack([loss for loss, _ in found])
        metrics = jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *(metrics for _, metrics in found))
        # Logged as the mean, to be compared with other runs.
        return losses.sum(), {"loss": losses.mean(), **metrics}

    def _with_features(self, params: Params, batch: Batch) -> Batch:
        """Returns the batch with the features of its images."""
        if batch.image_embedding is not None:
            return batch

        def tower(images: Any, _: Any) -> TowerOutput:
            return TowerOutput(self.features(params, images), jnp.zeros((0, 0, 0)), {}, {})

        features = microbatches.apply(tower, batch.image, None, self.config.microbatches).embedding
        return dataclasses.replace(batch, image=None, image_embedding=features)

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Returns the model as a classifier whose M predictions of an image are those of the members, with their noise.

        See `ContrastiveTask`.
        """
        texts = [None] * self.num_members if classes is None else self.parts(classes)
        each = [self.one.image_classifier(*of_member) for of_member in zip(self.members(params), texts, strict=True)]
        bias = jnp.mean(jnp.stack([jnp.asarray(one.pair_bias) for one in each]))

        def logits(image: Float[Array, "n d"], key: Key[Array, ""] | None, num_samples: int) -> LogitSamples:
            keys = [None if key is None else _of_member(key, number) for number in range(len(each))]
            samples = [one.logits(image, own, num_samples) for one, own in zip(each, keys, strict=True)]
            # A softmax over texts takes no notice of a number that is added to all its logits.
            return _side_by_side(samples, [one.pair_bias - bias for one in each])

        def mean(name: str) -> Callable[[Float[Array, "n d"]], Array]:
            return lambda image: jnp.mean(jnp.stack([getattr(one, name)(image) for one in each]), axis=0)

        return dataclasses.replace(
            each[0],
            logits=logits,
            embeddings=lambda image: self._joined([one.embeddings(image) for one in each]),
            noise_norm=mean("noise_norm"),
            noise_spectrum=mean("noise_spectrum"),
            pair_bias=bias,
        )

    def encode_text(self, params: Params, text: Int[Array, "b l"]) -> Float[Array, "b md"]:
        """Returns the embeddings of all members, side by side."""
        return self._joined([self.one.encode_text(of_member, text) for of_member in self.members(params)])

    def mean_text_key(self, params: Params, keys: Float[Array, "k t md"]) -> Float[Array, "k md"]:
        """Returns the embeddings of each class name from those of its t prompts, of each member for itself."""
        pairs = zip(self.members(params), self.parts(keys), strict=True)
        return self._joined([self.one.mean_text_key(of_member, part) for of_member, part in pairs])

    def temperature(self, params: Params) -> Float[Array, ""]:
        """Returns the mean of the members' τ."""
        return jnp.mean(jnp.stack([self.one.temperature(of_member) for of_member in self.members(params)]))

    def parts(self, embeddings: Float[Array, "*n md"]) -> list[Float[Array, "*n d"]]:
        """Returns the unit embeddings of each member, from those that are side by side."""
        return jnp.split(embeddings * math.sqrt(self.num_members), self.num_members, axis=-1)

    def _joined(self, parts: list[Float[Array, "*n d"]]) -> Float[Array, "*n md"]:
        return jnp.concatenate(parts, axis=-1) / math.sqrt(self.num_members)


def _own(params: Params) -> Params:
    """Returns what every member has for itself."""
    return {part: tree for part, tree in params.items() if part != _SHARED}


def _of_member(key: Key[Array, ""], number: int) -> Key[Array, ""]:
    """Returns the key of a member; the first has that of a single one."""
    return jax.random.fold_in(key, number) if number else key


def _side_by_side(samples: list[LogitSamples], added: list[Float[Array, ""]]) -> LogitSamples:
    """Returns samples of all members' logits for the same images, with a number added to those of each member."""
    first, m = samples[0], len(samples)
    keys: list[Any] = [one.keys for one in samples]

    def logits(common: Any, keys: Key[Array, "n m"] | None, indices: Int[Array, " t"]) -> Float[Array, "n t mk"]:
        own = [None if keys is None else keys[:, number] for number in range(m)]
        each = zip(samples, common, own, added, strict=True)
        return jnp.concatenate([one.logits(state, key, indices) + bias for one, state, key, bias in each], axis=-1)

    return dataclasses.replace(
        first,
        keys=None if first.keys is None else jnp.stack(keys, axis=1),
        prepare=lambda features: tuple(one.prepare(features) for one in samples),
        logits=logits,
        examples_per_block=max(1, first.examples_per_block // m),
        num_members=m,
    )
