"""Exports text decoders on image towers to folders that `transformers` loads as `VisionEncoderDecoderModel`.

The decoder becomes GPT-2 with attention to the image model. GPT-2 has no biases of logits, and its keys and values of
images have the width of its own tokens. A decoder with biases, or on a wider tower, is therefore written with more
dimensions of its tokens (see `widening`). They are 0 up to the last norm, which makes one of them 1: its row of the
kernel of logits holds the biases.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.positions import sinusoidal_positions
from lit_het.types import Params
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.exporting import preprocessing, to_float32, write_folder
from lit_het.weights.huggingface.image_models import ACTIVATION_NAMES, Flat, encoder_fields, require, write_token_tower
from lit_het.weights.huggingface.tokenizer import SentencePiece, tokenizer_files
from lit_het.weights.huggingface.widening import below, centred, padded, widened_attention, widened_mlp, widened_norm

# Fast attention of GPUs wants heads of a multiple of these dimensions.
_OF_HEADS = 8


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Tokens that generation treats differently.

    Attributes:
        start: the input from which the first token of a text is predicted.
        end: ends a text.
        padding: fills the rest of a text.
        unwritten: tokens that are never written.
    """

    start: int
    end: int
    padding: int
    unwritten: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class WrittenDecoder:
    """A decoder as GPT-2.

    Attributes:
        config: its configuration, of the class of `transformers`.
        arrays: its parameters by their names.
        projection: ``[width source]``, a dense layer without bias that gives tokens of images GPT-2's width; None where
            they have it.
    """

    config: Any
    arrays: Flat
    projection: np.ndarray | None


def write_image_decoder(
    folder: Path,
    image_tower: ViTConfig,
    decoder: DecoderConfig,
    params: Params,
    temperature: float,
    tokenizer: SentencePiece,
    tokens: SpecialTokens,
    image_processor: Mapping[str, Any],
) -> None:
    """Writes the parameters, the configurations of model and generation, the image processor and the tokenizer.

    Args:
        folder: created if missing.
        image_tower: the image tower, without pooling.
        decoder: the decoder.
        params: of the captioning task: ``image_tower``, ``decoder`` and ``head``, whose noise is not exported.
        temperature: divides the logits.
        tokenizer: the tokenizer of training.
        tokens: of generation.
        image_processor: as of `exporting.write_image_text`.
    """
    image = write_token_tower(image_tower, to_float32(params["image_tower"]))
    head, source = to_float32(params["head"]), image_tower.encoder.width
    text = write_decoder(decoder, to_float32(params["decoder"]), head, temperature, source)
    arrays = {f"encoder.{name}": array for name, array in image.arrays.items()}
    arrays |= {f"decoder.{name}": array for name, array in text.arrays.items()}
    if text.projection is not None:
        arrays["enc_to_dec_proj.weight"] = text.projection
        arrays["enc_to_dec_proj.bias"] = np.zeros(len(text.projection), np.float32)
    special: dict[str, Any] = {
        "decoder_start_token_id": tokens.start,
        "eos_token_id": tokens.end,
        "pad_token_id": tokens.padding,
    }
    config = transformers.VisionEncoderDecoderConfig(
        encoder=image.config.to_dict(),
        decoder=text.config.to_dict(),
        architectures=["VisionEncoderDecoderModel"],
        dtype="float32",
        **special,
    )
    # With the start token, which no position is needed for.
    generation = transformers.GenerationConfig(
        max_length=tokenizer.length + 1, suppress_tokens=list(tokens.unwritten) or None, **special
    )
    files = tokenizer_files(tokenizer) | {
        "generation_config.json": generation.to_diff_dict(),
        "preprocessor_config.json": preprocessing(image_tower, image_processor),
    }
    write_folder(folder, config, files, arrays)
    (folder / "spiece.model").write_bytes(tokenizer.model_bytes)


def write_decoder(
    decoder: DecoderConfig, params: Flat, head: Flat, temperature: float, source_width: int
) -> WrittenDecoder:
    """Returns a decoder and its logits as GPT-2 that computes the same, up to rounding if it is widened.

    Args:
        decoder: its configuration.
        params: of the decoder, by path.
        head: ``logits/bias`` and, unless the output is tied, ``logits/kernel``.
        temperature: divides the logits.
        source_width: of the tokens that it attends to.
    """
    # Causal it is as GPT-2; image towers must not be.
    encoder = dataclasses.replace(decoder.encoder, causal=False)
    require("GPT2LMHeadModel", encoder_fields("decoder", "GPT2LMHeadModel", encoder))
    old, width = encoder.width, _width(decoder, source_width, has_bias=bool(head["logits/bias"].any()))
    is_tied = decoder.tied_output and not decoder.scaled_embedding and width == old
    exact = _prepared(decoder, params, head, temperature)
    if width > old:
        exact = _widened(exact, encoder.num_heads, width)
    for layer in ("key", "value"):
        path = f"blocks/source_attention/{layer}/kernel"
        exact[path] = padded(exact[path], width, width)
    if is_tied:
        del exact["logits/kernel"]
    config = transformers.GPT2Config(
        vocab_size=decoder.vocabulary_size,
        n_positions=decoder.length,
        n_embd=width,
        n_layer=encoder.depth,
        n_head=encoder.num_heads,
        n_inner=encoder.mlp_width,
        activation_function=ACTIVATION_NAMES[encoder.activation],
        layer_norm_epsilon=encoder.norm_epsilon * old / width,
        embd_pdrop=decoder.dropout,
        resid_pdrop=decoder.dropout,
        attn_pdrop=decoder.attention_dropout,
        add_cross_attention=True,
        tie_word_embeddings=is_tied,
        # The defaults of `transformers` are GPT-2's tokens.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    arrays = names.named_arrays(names.GPT2, "", "", {path: array.astype(np.float32) for path, array in exact.items()})
    return WrittenDecoder(config, arrays, None if width == source_width else np.eye(width, source_width))


def _width(decoder: DecoderConfig, source_width: int, *, has_bias: bool) -> int:
    """Returns the width of GPT-2: the decoder's, or more for the tower's tokens or for the biases of logits."""
    needed, num_heads = max(decoder.encoder.width + has_bias, source_width), decoder.encoder.num_heads
    if needed == decoder.encoder.width:
        return needed
    return -(-needed // (num_heads * _OF_HEADS)) * num_heads * _OF_HEADS


def _prepared(decoder: DecoderConfig, params: Flat, head: Flat, temperature: float) -> Flat:
    """Returns all parameters in double precision: with positions, and with τ in the last norm and the biases."""
    width = decoder.encoder.width
    exact = {path: array.astype(np.float64) for path, array in params.items()}
    tokens = exact["tokens/embedding"]
    return {
        # Fixed positions are stored like learned ones.
        "positions": sinusoidal_positions(decoder.length, width).astype(np.float64),
        **exact,
        "tokens/embedding": tokens * np.sqrt(width) if decoder.scaled_embedding else tokens,
        "norm/scale": exact["norm/scale"] / temperature,
        "norm/bias": exact["norm/bias"] / temperature,
        "logits/kernel": tokens.T if decoder.tied_output else head["logits/kernel"].astype(np.float64),
        "logits/bias": head["logits/bias"].astype(np.float64) / temperature,
    }


def _widened(params: Flat, num_heads: int, width: int) -> Flat:
    """Returns the parameters for tokens of ``width`` dimensions, one of which carries the biases of logits."""
    old = params["norm/scale"].size
    found = {name: padded(centred(params[name]), width) for name in ("tokens/embedding", "positions")}
    for layer in ("attention", "source_attention"):
        path = f"blocks/{layer}"
        found |= below(path, widened_attention(params, path, num_heads, width))
    found |= below("blocks/mlp", widened_mlp(params, "blocks/mlp", width))
    for path in (*(f"blocks/{layer}_norm" for layer in ("attention", "source", "mlp")), "norm"):
        found |= below(path, widened_norm(params, path, width))
    kernel = padded(params["logits/kernel"], width, params["logits/kernel"].shape[1])
    found["norm/bias"][old], kernel[old] = 1.0, params["logits/bias"]
    return found | {"logits/kernel": kernel}
