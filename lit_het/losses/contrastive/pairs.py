"""Queries, keys and their logits: what every form of a contrastive loss sees."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from lit_het.mixtures import MixedImages
from lit_het.trees import tree_of_arrays
from lit_het.types import MASKED, Queries


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples of a batch, as queries or as keys.

    Attributes:
        weight: weight in the mean loss; 0 for an invalid example.
        index: position in the global batch; a query and a key of the same index are partners.
        ids: hashes of the image and of the text; a query and a key that share one of them are positives too.
        mixed: what images are mixed of; None for texts, and where they are not mixed.
        members: M, keys of each example, or queries of it without noise; above 1 only for images of an ensemble.
    """

    weight: Float[Array, " n"]
    index: Int[Array, " n"]
    ids: tuple[UInt32[Array, "n 2"], ...] = ()
    mixed: MixedImages | None = None
    members: int = dataclasses.field(default=1, metadata={"static": True})


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Pairs:
    """All pairs of n queries and m keys: one direction of a contrastive loss, or a block of it.

    Attributes:
        queries: S embeddings per example, noisy or not.
        query_examples: of the queries.
        keys: noiseless embeddings.
        key_examples: of the keys.
        temperature: τ.
        bias: added to logits.
        smoothing: α, the share of the uniform distribution in the targets.
    """

    queries: Queries
    query_examples: Examples
    keys: Float[Array, "m d"]
    key_examples: Examples
    temperature: Float[Array, ""]
    bias: Float[Array, ""]
    smoothing: float = dataclasses.field(default=0.0, metadata={"static": True})

    def block(
        self, queries: Queries, query_examples: Examples, keys: Float[Array, "m d"], key_examples: Examples
    ) -> "Pairs":
        """Returns pairs of other queries and keys of the same loss."""
        return Pairs(queries, query_examples, keys, key_examples, self.temperature, self.bias, self.smoothing)

    @property
    def logits(self) -> Float[Array, "n s m"]:
        """``q_ns · k_m / τ + bias``."""
        return self.queries.products(self.keys) / self.temperature + self.bias

    @property
    def masked_logits(self) -> Float[Array, "n s m"]:
        """The logits, `MASKED` where the key is invalid."""
        return self.masked(self.logits)

    @property
    def factor_logits(self) -> Float[Array, "n r m"]:
        """``R_n k_m / τ``, the standard deviations of the logits along the factors of the noise."""
        return self.queries.factor_products(self.keys) / self.temperature

    def masked(self, logits: Float[Array, "n s m"]) -> Float[Array, "n s m"]:
        """Returns logits, `MASKED` where the key is invalid."""
        return jnp.where((self.key_examples.weight > 0)[None, None], logits, MASKED)

    @property
    def is_partner(self) -> Bool[Array, "n m"]:
        """Whether a query and a key belong to the same example."""
        return self.query_examples.index[:, None] == self.key_examples.index[None]

    @property
    def is_positive(self) -> Bool[Array, "n m"]:
        """Whether a query and a key belong together: partners, and examples with the same image or the same text."""
        return _belong(self.query_examples, self.key_examples)

    @property
    def mixed(self) -> MixedImages | None:
        """What the images are mixed of, which are the queries or the keys."""
        return self.query_examples.mixed or self.key_examples.mixed

    @property
    def label(self) -> Float[Array, "n m"]:
        """The probability that a query and a key belong together: of a mixed image the shares of its positives.

        It is smoothed between both labels.
        """
        query, key = self.query_examples, self.key_examples
        if query.mixed is not None:
            share, other = query.mixed.share[:, None], _belong(query.mixed, key)
        elif key.mixed is not None:
            share, other = key.mixed.share[None], _belong(query, key.mixed)
        else:
            return self.smoothed(self.is_positive.astype(jnp.float32), 0.5)
        return self.smoothed(share * self.is_positive + (1 - share) * other, 0.5)

    def smoothed(self, one: Float[Array, "..."], uniform: Float[Array, "..."] | float) -> Float[Array, "..."]:
        """Returns ``(1 - α) one + α uniform``, of the target's own part and of the uniform distribution."""
        return (1 - self.smoothing) * one + self.smoothing * uniform

    @property
    def has_one_positive(self) -> bool:
        """Whether the partner is the only positive."""
        return not self.query_examples.ids and self.query_examples.members == self.key_examples.members == 1

    def of_positives(self, logits: Float[Array, "n s m"]) -> Float[Array, "n s m"]:
        """Returns logits, `MASKED` where a query and a key do not belong together."""
        return jnp.where(self.is_positive[:, None], logits, MASKED)

    def positive_logit(self, logits: Float[Array, "n s m"], axis: int | tuple[int, ...] = -1) -> Float[Array, "..."]:
        """Returns the log of the summed exponentials of the logits of positives: of each query, or along other axes.

        With one positive it is exactly the logit with the partner, and `MASKED` if that is not among these examples.
        """
        if not self.has_one_positive:
            return jax.nn.logsumexp(self.of_positives(logits), axis=axis)
        # With one positive there is nothing to sum: no exponentials, and no second pass over the logits.
        is_partner = self.is_partner[:, None]
        found = jnp.sum(logits, axis=axis, where=is_partner)
        return jnp.where(jnp.any(is_partner, axis=axis), found, MASKED)

    def positive_share(self, log_share: Float[Array, "n s m"]) -> Float[Array, "n _ m"]:
        """Returns the share of each pair in the probability of its positives, from its logarithm; 0 for negatives."""
        if not self.has_one_positive:
            return jnp.exp(self.of_positives(log_share))
        return self.is_partner[:, None].astype(log_share.dtype)  # a partner has the whole share

    def partner_logit(self, logits: Float[Array, "n s m"]) -> Float[Array, "n s"]:
        """Returns each query's logit with its partner; 0 where the partner is not among these keys."""
        return jnp.sum(logits, axis=-1, where=self.is_partner[:, None])


def _belong(query: Examples | MixedImages, key: Examples | MixedImages) -> Bool[Array, "n m"]:
    """Returns whether examples are the same, or have the same image or text."""
    found = query.index[:, None] == key.index[None]
    for query_ids, key_ids in zip(query.ids, key.ids, strict=True):
        found |= jnp.all(query_ids[:, None] == key_ids[None], axis=-1)
    return found
