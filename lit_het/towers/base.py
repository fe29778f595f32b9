"""What the configurations of towers say of them: whatever uses a tower asks these questions, and not its class."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from lit_het.towers.encoder_config import ComputeType, layers_above
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.tuning_config import Tuning
from lit_het.types import Params

EXECUTION_FIELDS = (
    "encoder.unrolled",
    "encoder.remat",
    "encoder.compute_type",
    "encoder.initial_layer_scale",
    "encoder.experts.initial_noise",
    "encoder.experts.permutation",
    "compute_type",
    "weights",
    "members",
    "patch_sizes",
    "tuning",
)
"""Beginnings of the fields that change how a tower is computed or where it comes from, but not the tower."""

FIELDS_WITHOUT_PARAMETERS = (*EXECUTION_FIELDS, "layer_input")
"""Fields by which towers with the same parameters may differ."""

TRAINING_FIELDS = (
    "dropout",
    "attention_dropout",
    "encoder.experts.capacity_factor",
    "encoder.experts.noise_scale",
    "encoder.experts.auxiliary_weight",
)
"""Beginnings of the fields that change how a tower is trained, but not the output of a trained one."""

LATER_FIELDS: Mapping[str, Any] = {
    "uncertainty_token": False,
    "uncertainty_from": "token",
    "norm_twice": False,
    "layer_input": False,
    "padding_token": None,
    "scaled_embedding": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "num_inputs": 1,
    "inputs_as": "channels",
    "num_class_tokens": 1,
    "class_token": False,
    "mean_pooling": False,
    "rotary": None,
    "pooling_heads": None,
    "encoder.norm": "layer",
    "encoder.head_size": None,
    "encoder.first_norm": True,
    "encoder.initial_layer_scale": 1.0,
    "max_patches": None,
    "top": None,
    "stem": None,
    "encoder.experts.tiled": True,
    "encoder.experts.overlap": 0,
    "encoder.experts.multi_pred": False,
    "encoder.experts.dropout_samples": 1,
    "encoder.experts.rank_one": None,
}
"""Fields that towers gained after embeddings had been stored, with the value that changes nothing."""


class TowerOptions:
    """What the configuration of a tower says of it; here, of one with a plain embedding of each input.

    Attributes:
        encoder: the stack of blocks of a Transformer; None of another tower.
        embedding_size: size of the embedding.
        weights: pretrained weights, a path or address; None for random weights.
        tuning: which of its parameters are trained; None for all that the task does not lock.
        uncertainty_token: whether the embedding is ``[mean, log σ²]``.
        layer_input: whether the embedding is followed by the input of the last layer.
        last_layer: path of the parameters of the linear layer at the very end; None where the tower ends otherwise.
        pooling: how its tokens become an embedding; None of a tower without.
        pools_tokens: whether its tokens can be read beside an embedding.
        representation_size, pooler, projection_size: the linear layers after the pooling, each None or False without.
        top: blocks above the encoder's last norm; None for none.
        first_parameters: names of the parameters before the encoder.
        masked_token: id of the token to which no other attends; None where all are seen.
    """

    encoder: Any = None
    embedding_size: Any
    weights: Any = None
    tuning: Tuning | None = None
    uncertainty_token: Any = False
    layer_input: Any = False
    last_layer: Any = None
    pooling: Any = None
    pools_tokens: Any = True
    representation_size: Any = None
    pooler: Any = False
    projection_size: Any = None
    top: Any = None
    first_parameters: tuple[str, ...] = ()
    masked_token: Any = None

    @property
    def compute_type(self) -> ComputeType:
        """Type of activations."""
        return self.encoder.compute_type

    @property
    def experts(self) -> ExpertsConfig | None:
        """Of its encoder."""
        return None if self.encoder is None else self.encoder.experts

    @property
    def num_members(self) -> int:
        """The number of members of an ensemble (e3); 1 of a single model."""
        return 1 if self.encoder is None else self.encoder.num_members

    @property
    def free_fields(self) -> tuple[str, ...]:
        """Beginnings of the fields by which a tower whose parameters it takes may differ."""
        return FIELDS_WITHOUT_PARAMETERS

    @property
    def appended(self) -> str:
        """The field by which the output is more than one plain embedding, which only some heads read; "" for none."""
        return next((field for field in ("uncertainty_token", "layer_input") if getattr(self, field)), "")

    @property
    def has_variances(self) -> bool:
        """Whether the embedding is ``[mean, log σ²]``."""
        return self.uncertainty_token

    @property
    def input_size(self) -> int:
        """Size of the input of the last layer, where it follows the embedding; 0 otherwise."""
        return self.encoder.width if self.layer_input else 0

    @property
    def output_size(self) -> int:
        """Size of the embedding and of what follows it."""
        return self.embedding_size + self.input_size

    def with_last_input(self) -> Any:
        """Returns the tower whose embedding is followed by the input of its last linear layer; itself without one."""
        return self if self.last_layer is None else dataclasses.replace(self, layer_input=True)  # pyright: ignore[reportArgumentType]

    def with_encoder(self, **fields: Any) -> Any:
        """Returns the tower with other fields of its encoder."""
        return dataclasses.replace(self, encoder=dataclasses.replace(self.encoder, **fields))  # pyright: ignore[reportArgumentType]

    def in_float32(self) -> Any:
        """Returns the tower that computes in float32, for other programs."""
        return self.with_encoder(compute_type="float32", remat="none")

    def file_options(self) -> dict[str, Any]:
        """Returns what it says about a file of weights, as arguments of `lit_het.weights.formats.open_weights`."""
        experts = {} if self.experts is None else dataclasses.asdict(self.experts)
        return {"compute_type": self.compute_type, "experts": experts}

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each parameter, see `encoder_config.layers_above`."""
        return layers_above(self.encoder, self.first_parameters, params)


class ImageTowerOptions(TowerOptions):
    """What the configuration of an image tower says of it.

    Attributes:
        image_size: height and width in pixels.
        members: how embeddings of an ensemble's members are combined: by their mean, concatenated, or "apart".
        num_inputs: images that it sees at once.
        patch_sizes: sizes of patches that training draws from; empty for one.
        num_tokens: tokens of an image that a decoder can attend to; 0 for none.
        patches: how images that keep their aspect ratio become patches; None for squares.
    """

    image_size: Any
    members: Any = "mean"
    num_inputs: Any = 1
    patch_sizes: Any = ()
    num_tokens: Any = 0
    patches: Any = None

    @property
    def mean_size(self) -> int:
        """The entries of a member's output that are its (mean) embedding."""
        return self.embedding_size

    def all_members(self) -> Any:
        """Returns the tower whose output has the embeddings of all members, side by side."""
        return self

    def join_members(self, by_image: Float[Array, "b m d"]) -> Float[Array, "_ _"]:
        """Returns embeddings of an ensemble's members, combined as ``members`` defines."""
        match self.members:
            case "concatenated":
                return by_image.reshape(by_image.shape[0], -1)
            case "apart":
                return by_image.reshape(-1, by_image.shape[2])
            case _:
                return by_image.mean(axis=1)

    def without_pooling(self) -> Any:
        """Returns the tower whose output is all tokens, with no layer behind the last block; None if it has none."""

    def unseen_pixels(self) -> str | None:
        """Returns which pixels of an image are not seen, and what to choose instead; None if all are seen."""
