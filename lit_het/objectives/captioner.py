"""A text decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2, Sec. 2.2)."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float

from lit_het.errors import FieldError, UserError
from lit_het.heads.classification_config import DeterministicConfig, TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.objectives.base import Context, Objective, Setup
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.types import Metrics, Params

if TYPE_CHECKING:
    from flax import nnx


@dataclasses.dataclass(frozen=True)
class CaptionerConfig(Objective):
    """A text decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2, Sec. 2.2).

    Attributes:
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        weight: of that loss: 1 in SigLIP 2, 2 in CoCa.
    """

    decoder: DecoderConfig = DecoderConfig()
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    weight: float = 1.0

    reads_targets = True

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise FieldError(self, "weight", f"{self.weight} must be above 0; task.captioner None leaves the loss out")
        self.decoder.check_head(self.head, "task.captioner")
        self.head.check_loss(self.loss, "task.captioner")

    def modules(self, task: Any, rngs: "nnx.Rngs") -> "nnx.Module":
        """Returns the decoder and its head."""
        from flax import nnx

        from lit_het.objectives.tokens import build_head

        decoder = self.decoder.build(task.image_tower.encoder.width, rngs)
        return nnx.Dict(decoder=decoder, head=build_head(self.decoder, self.head, decoder, rngs))

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each of its parameters, see `encoder_config.layers_above`."""
        return {**super().layers_above(params), "decoder": self.decoder.layers_above(params["decoder"])}

    def check(self, setup: Setup) -> None:
        """Checks that the image tower has tokens to attend to, besides its pooled embedding and captions."""
        setup.require_captions("captioner")
        tower = setup.task.image_tower
        if not tower.pools_tokens or tower.without_pooling() is None:
            raise UserError(
                "task.captioner attends to the tokens of an image: it needs a ViT with a pooling, without ensembles of "
                "experts, uncertainty tokens and max_patches"
            )
        if setup.task.microbatches > 1:
            raise UserError("task.captioner needs the tokens of a whole batch; set task.microbatches to 1")
        for name, other in setup.task.objectives.items():
            if other.mixes_images:
                raise UserError(
                    f"task.captioner writes the caption of one image, not of mixed ones; leave out task.{name}"
                )
        if setup.tokenizer is not None:
            self._check_data(setup.run.data, setup.tokenizer)

    def _check_data(self, data: Any, tokenizer: Any) -> None:
        self.decoder.check_tokenizer(tokenizer, data.prompt, "--task.captioner.decoder")
        if any(data.prompts):
            raise UserError(
                "the text tower reads the same tokens as the captioner, without prompts or questions: set data.prompt "
                "to ''"
            )
        for field, inputs in (("embeddings", "images"), ("text_embeddings", "captions")):
            if getattr(data, field) is not None:
                flag = field.replace("_", "-")
                raise UserError(f"--task.captioner reads {inputs}; leave it out, or leave out --data.{flag}")

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted loss of the next token, and metrics."""
        from lit_het.objectives.tokens import token_loss
        from lit_het.towers.decoder import Source

        if "image" not in context.outputs or context.batch.text_target is None:
            raise UserError(
                "task.captioner needs images, not their stored embeddings, and the tokens of captions: leave out "
                "data.embeddings, and set data.prompt, to '' for no prompt"
            )
        decoder, head = context.model.captioner.decoder, context.model.captioner.head
        source = Source(context.outputs["image"].tokens)
        value, found = token_loss(decoder, head, self.loss, source, context.batch, context.keys)
        return self.weight * value, {"caption_loss": value, **{f"caption_{name}": x for name, x in found.items()}}

    def largest_array(self, task: Any, rows: int, batch_size: int) -> int:
        """Returns the numbers of a block of logits."""
        from lit_het.objectives.tokens import token_logits_at_once

        return token_logits_at_once(self.decoder, self.head, rows)
