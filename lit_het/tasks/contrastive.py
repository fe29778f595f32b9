"""LiT (Zhai et al. 2022): a locked image tower, a trainable text tower, a contrastive head and loss."""

import dataclasses
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

from lit_het.errors import UserError
from lit_het.heads.base import ContrastiveHead
from lit_het.heads.contrastive import ContrastiveHeadConfig, DeterministicContrastiveConfig
from lit_het.losses.base import masked_mean
from lit_het.losses.contrastive import ContrastiveLoss, SoftmaxLoss
from lit_het.random import Keys
from lit_het.tasks.base import trained_parts
from lit_het.towers.bert import BertConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, Metrics, Params, TowerOutput


@dataclasses.dataclass(frozen=True)
class ContrastiveConfig:
    """An image-text model.

    Attributes:
        image_tower: the tower whose embedding the text tower learns to meet.
        text_tower: the text tower; its ``embedding_size`` equals the image tower's.
        head: how pairs of embeddings become keys and queries.
        loss: what scores them.
        locked: patterns of parameters to lock: LiT locks the image tower, and only it.

    Raises:
        UserError: the towers' embeddings differ in size, or members of an ensemble stay apart.
    """

    image_tower: ViTConfig | ResNetConfig = ViTConfig()
    text_tower: TextConfig | BertConfig = TextConfig()
    head: ContrastiveHeadConfig = DeterministicContrastiveConfig()
    loss: ContrastiveLoss = SoftmaxLoss()
    locked: tuple[str, ...] = ("image_tower/.*",)

    def __post_init__(self) -> None:
        image, text = self.image_tower.embedding_size, self.text_tower.embedding_size
        if image != text:
            raise UserError(f"text_tower.embedding_size = {text} must equal the image tower's embedding size {image}")
        if isinstance(self.image_tower, ViTConfig) and self.image_tower.members == "apart":
            raise UserError(
                "image_tower.members = 'apart' gives an image several embeddings; take 'mean' or 'concatenated'"
            )

    def build(self) -> "ContrastiveTask":
        """Returns the task."""
        return ContrastiveTask(self)


ImageOrStored: TypeAlias = UInt8[Array, "b h w c"] | Float[Array, "b stored"]
"""Pixels, or what the image tower once made of them (of the members of an ensemble side by side)."""


class TwoTowers(nnx.Module):
    """Both towers and the head under the names that parameter paths begin with."""

    head: ContrastiveHead

    def __init__(self, config: ContrastiveConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.text_tower = config.text_tower.build(rngs)
        self.head = config.head.build(config.image_tower.embedding_size, rngs)


class ContrastiveTask:
    """The task of a `ContrastiveConfig`."""

    def __init__(self, config: ContrastiveConfig):
        self.config = config
        self.locked = config.locked
        self.graph, shapes = nnx.split(nnx.eval_shape(lambda: TwoTowers(config, nnx.Rngs(0))))
        self.trained = trained_parts(nnx.to_pure_dict(shapes), config.locked)

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(TwoTowers(self.config, nnx.Rngs(params=key))))

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the contrastive loss of the batch, and metrics."""
        assert batch.text is not None
        model = self._model(params)
        image, routed = self._image_embedding(model, batch.view, self._routing_key("image_tower", keys))
        text = model.text_tower(batch.text, self._routing_key("text_tower", keys))
        # An invalid row may be anything, not a number included, whose gradient no weight of zero would undo.
        image, words = (jnp.where(batch.valid[:, None], side, 1.0) for side in (image, text.embedding))
        samples = model.head(image, words, keys("noise"))
        loss = self.config.loss(samples, batch.valid)
        metrics = {
            "temperature": samples.temperature,
            "image_noise_norm": masked_mean(model.head.image_noise_norm(image), batch.valid),
            "text_noise_norm": masked_mean(model.head.text_noise_norm(words), batch.valid),
        }
        for name, tower in (("image", routed), ("text", text)):
            metrics |= {f"{name}_{key}": value for key, value in (tower.metrics if tower else {}).items()}
            loss = loss + sum((tower.auxiliary_losses if tower else {}).values())
        return loss, metrics

    def encode_image(self, params: Params, image: ImageOrStored) -> tuple[Float[Array, "b d"], Float[Array, " b"]]:
        """Returns noiseless embeddings and the norm of the noise."""
        model = self._model(params)
        embedding, _ = self._image_embedding(model, image)
        return model.head.image_key(embedding), model.head.image_noise_norm(embedding)

    def sample_image(
        self, params: Params, image: ImageOrStored, key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "b s d"]:
        """Returns S noisy embeddings of each image (HET-XL App. M), or one where the head has no noise for images."""
        model = self._model(params)
        embedding, _ = self._image_embedding(model, image)
        queries = model.head.image_queries(embedding, key, num_samples)
        return model.head.image_key(embedding)[:, None] if queries is None else queries.held_singly()

    def encode_text(self, params: Params, text: Int[Array, "b l"]) -> tuple[Float[Array, "b d"], Float[Array, " b"]]:
        """Returns noiseless embeddings and the norm of the noise."""
        model = self._model(params)
        embedding = model.text_tower(text).embedding
        return model.head.text_key(embedding), model.head.text_noise_norm(embedding)

    def temperature(self, params: Params) -> Float[Array, ""]:
        """Returns τ."""
        return self._model(params).head.temperature()

    def _model(self, params: Params) -> TwoTowers:
        return nnx.merge(self.graph, params)

    def _routing_key(self, tower: str, keys: Keys) -> Key[Array, ""] | None:
        """Returns the randomness of a tower's experts; a locked tower has none."""
        return keys(f"{tower}_routing") if tower in self.trained else None

    def _image_embedding(
        self, model: TwoTowers, image: ImageOrStored, key: Key[Array, ""] | None = None
    ) -> tuple[Float[Array, "b d"], TowerOutput | None]:
        """Returns the embedding of pixels, with what else the tower makes of them, or that which was stored."""
        if image.ndim == 4:
            output = model.image_tower(image, key)
            return output.embedding, output
        tower = self.config.image_tower
        members, size = 1, tower.embedding_size
        if isinstance(tower, ViTConfig):
            members, size = tower.encoder.num_members, tower.member_size
        if image.shape[1] != members * size:
            raise UserError(
                f"stored image embeddings have size {image.shape[1]}, the image tower's have {members * size}"
            )
        stored = image.astype(jnp.float32)
        if isinstance(tower, ViTConfig):
            stored = tower.join_members(stored.reshape(-1, size))
        return stored, None
