"""A text decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2, Sec. 2.2)."""

from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError
from lit_het.heads.base import ClassificationHead
from lit_het.objectives.base import Context
from lit_het.objectives.captioner_config import CaptionerConfig
from lit_het.objectives.tokens import build_head, token_loss
from lit_het.towers.decoder import Source
from lit_het.types import Metrics


class Captioner(nnx.Module):
    """The decoder and the head of a `CaptionerConfig`."""

    head: ClassificationHead

    def __init__(self, config: CaptionerConfig, source_width: int, rngs: nnx.Rngs):
        self.config = config
        self.decoder = config.decoder.build(source_width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted loss of the next token, and metrics."""
        if "image" not in context.outputs or context.batch.text_target is None:
            raise UserError(
                "task.captioner needs images, not their stored embeddings, and the tokens of captions: leave out "
                "data.embeddings, and set data.prompt, to '' for no prompt"
            )
        config, source = self.config, Source(context.outputs["image"].tokens)
        value, found = token_loss(self.decoder, self.head, config.loss, source, context.batch, context.keys)
        return config.weight * value, {"caption_loss": value, **{f"caption_{name}": x for name, x in found.items()}}
