"""Groups of whole images, whose tokens are routed to experts together."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from lit_het import sharding


@dataclasses.dataclass(frozen=True)
class Groups:
    """A batch as groups of whole images, which are routed independently, for each member of an ensemble.

    Groups have equal sizes; the last one of each device is padded with zeros if necessary.

    Attributes:
        shards: number of parts of the batch, one per device; no group spans two devices.
        images: images per shard.
        groups: groups per shard.
        images_of_group: images per group.
        members: M.
        tokens: tokens per image.
    """

    shards: int
    images: int
    groups: int
    images_of_group: int
    members: int
    tokens: int

    @property
    def is_filled_up(self) -> bool:
        """Whether there are groups with padding."""
        return self.groups * self.images_of_group > self.images

    def split(self, x: Array) -> Array:
        """Returns ``[groups*members tokens_of_group d]`` for ``[b*n d]``."""
        x = x.reshape(self.shards, self.images, self.members, self.tokens, -1)
        fill = self.groups * self.images_of_group - self.images
        x = jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(-1, self.images_of_group, self.members, self.tokens, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(-1, self.images_of_group * self.tokens, x.shape[-1])

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        x = x.reshape(-1, self.members, self.images_of_group, self.tokens, x.shape[-1]).swapaxes(1, 2)
        x = x.reshape(self.shards, -1, self.members, self.tokens, x.shape[-1])[:, : self.images]
        return x.reshape(-1, x.shape[-1])


def group_images(b: int, tokens: int, members: int, most: int) -> Groups:
    """Returns the smallest number of groups of ``b`` examples of at most ``most`` tokens each.

    Args:
        b: examples; the copies of an image for the members of an ensemble are adjacent.
        tokens: of an example.
        members: M, copies of an image.
        most: tokens of a group; at least one image forms a group, even if it has more.
    """
    images, shards = b // members, sharding.num_automatic_shards()
    shards = shards if images % shards == 0 else 1
    images //= shards
    groups = -(-images // max(1, most // tokens))
    return Groups(shards, images, groups, -(-images // groups), members, tokens)
