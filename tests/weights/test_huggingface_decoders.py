"""Exported decoders write the greedy texts of the task in transformers, token for token, with the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.temperature import FixedTemperature
from lit_het.objectives.tokens import START_TOKEN, shifted
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights.huggingface.decoders import SpecialTokens, write_image_decoder
from tests.towers.models import drawn, with_encoder

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH = 12
TOKENIZER = SentencePieceTokenizer(
    train_sentencepiece(["a red square", "two blue circles", "one green bar"] * 5, vocabulary_size=40), LENGTH
)
SIZE = TOKENIZER.vocabulary_size
# The decoder has three tokens more than the tokenizer, which are not written.
TOKENS = SpecialTokens(START_TOKEN, TOKENIZER.end_id, TOKENIZER.padding_id, (0, SIZE, SIZE + 1, SIZE + 2))
ENCODER = EncoderConfig(width=16, depth=2, mlp_width=24, num_heads=2)
DECODER = DecoderConfig(SIZE + 3, LENGTH, dataclasses.replace(ENCODER, causal=True))
TOWER = ViTConfig(8, 4, ENCODER, pooling="none")
IMAGE = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), np.uint8)
TEXT = np.random.default_rng(1).integers(3, SIZE, (8, LENGTH)).astype(np.int32)


def decoder(**changes):
    return dataclasses.replace(DECODER, **changes)


NARROW, WIDE = (with_encoder(TOWER, width=width) for width in (8, 40))
FIXED = dataclasses.replace(TOWER, positions="sine_cosine")
PLAIN, WARM = CaptioningConfig(TOWER, DECODER), DeterministicConfig(FixedTemperature(0.7))
# The task, whether logits have biases, and the width of GPT-2.
TIED = dataclasses.replace(PLAIN, decoder=decoder(tied_output=True), head=WARM)
ORIGINAL = decoder(positions="sinusoidal", scaled_embedding=True, tied_output=True)
OTHER = CaptioningConfig(with_encoder(TOWER, activation="relu"), with_encoder(DECODER, activation="quick_gelu"))
CASES = {
    "tied": (TIED, False, 16),
    "tied with biases": (TIED, True, 32),
    "a narrow tower": (dataclasses.replace(PLAIN, image_tower=NARROW), False, 16),
    "a wide tower": (dataclasses.replace(PLAIN, image_tower=WIDE), False, 48),
    "the original Transformer's inputs": (CaptioningConfig(FIXED, ORIGINAL), False, 16),
    "other nonlinearities": (OTHER, True, 32),
    "HET-XL": (dataclasses.replace(PLAIN, head=HetXLConfig(CovarianceConfig(3))), True, 32),
}


def fresh(config, *, has_bias):
    """Returns the task with random parameters, none of which is 0 but biases of logits without ``has_bias``."""
    task = config.build()
    tree = drawn(task.shapes, 0.4, seed=2)
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf + np.float32(path[-1].key == "scale"), tree)
    if not has_bias:
        params["head"]["logits"]["bias"] = np.zeros(SIZE + 3, np.float32)
    return task, params


def write(folder, task, params):
    temperature = float(task.model(params).head.temperature())
    config = task.config
    write_image_decoder(folder, config.image_tower, config.decoder, params, temperature, TOKENIZER, TOKENS, {})


def logits(task, params, source):
    model = task.model(params)
    features, _ = model.decoder(shifted(jnp.asarray(TEXT)), model.decoder.start(*source))
    samples = model.head(features.reshape(TEXT.size, -1), None)
    return samples.logits(samples.prepare(samples.features), None, jnp.arange(1)).reshape(*TEXT.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_decoder_has_the_same_logits_and_greedy_texts_in_transformers(transformers, tmp_path, case):
    torch = pytest.importorskip("torch")
    config, has_bias, width = CASES[case]
    task, params = fresh(config, has_bias=has_bias)
    write(tmp_path, task, params)
    model, report = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.decoder.n_embd == width
    is_shared = model.decoder.lm_head.weight is model.decoder.transformer.wte.weight
    assert is_shared == (case == "tied")
    pixels = torch.tensor(np.moveaxis(IMAGE / 127.5 - 1, -1, 1), dtype=torch.float32)
    with torch.no_grad():
        inputs = torch.tensor(np.asarray(shifted(jnp.asarray(TEXT)))).long()
        theirs = model(pixel_values=pixels, decoder_input_ids=inputs).logits

    @jax.jit
    def source_and_logits(params, images):
        source = task.source(params, task.features(params, images))
        return source, logits(task, params, source)

    source, ours = source_and_logits(params, IMAGE)
    assert np.ptp(ours) > 2
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
    allowed = jnp.asarray(~np.isin(np.arange(SIZE + 3), TOKENS.unwritten))
    # Others differ from the first in what their equal logits show.
    prompts = {"tied": (0, 3), "other nonlinearities": (3,), "the original Transformer's inputs": (0,), "HET-XL": (0,)}
    for count in prompts.get(case, ()):
        how, given = GenerationConfig(num_tokens=LENGTH - count), (TEXT[:, :count], np.full(len(TEXT), count))

        @jax.jit
        def texts(params, source, given, how=how):
            prompt = Prompt(*given)
            return generate(task, params, source, prompt, how, end_token=TOKENS.end, allowed=allowed).tokens[:, 0]

        start = {"decoder_input_ids": torch.tensor(TEXT[:, :count]).long()} if count else {}
        found = model.generate(pixels, do_sample=False, **start).numpy()[:, count + 1 :]
        expected = np.asarray(texts(params, source, given))
        np.testing.assert_array_equal(found, expected[:, : found.shape[1]])
        assert not expected[:, found.shape[1] :].any()
        assert len(np.unique(expected, axis=0)) > 1, "texts of images differ"


NOT_IN_SIGLIP, NOT_IN_GPT2 = "is not supported by SiglipVisionModel", "is not supported by GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            CaptioningConfig(dataclasses.replace(TOWER, class_token=True), DECODER),
            f"class_token = True {NOT_IN_SIGLIP}",
        ),
        (CaptioningConfig(dataclasses.replace(TOWER, num_registers=2), DECODER), "num_registers = 2"),
        (CaptioningConfig(dataclasses.replace(TOWER, input_norm=True), DECODER), "input_norm = True"),
        (CaptioningConfig(with_encoder(TOWER, layer_scale=True), DECODER), "encoder.layer_scale = True"),
        (
            CaptioningConfig(with_encoder(TOWER, norm_placement="after"), DECODER),
            f"encoder.norm_placement = 'after' {NOT_IN_SIGLIP}, which has 'before'",
        ),
        (
            CaptioningConfig(TOWER, with_encoder(DECODER, norm_placement="after")),
            f"encoder.norm_placement = 'after' {NOT_IN_GPT2}, which has 'before'",
        ),
        (CaptioningConfig(TOWER, with_encoder(DECODER, activation="swiglu")), "encoder.activation = 'swiglu'"),
    ],
)
def test_what_transformers_lacks_is_one_line_and_writes_nothing(tmp_path, config, message):
    part = "decoder" if config.image_tower == TOWER else "image_tower"
    with pytest.raises(UserError, match=f"{part}.{message}.*; export with --to lit-het"):
        write(tmp_path / "folder", *fresh(config, has_bias=True))
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_the_folder_names_its_tokens_and_the_longest_text(transformers, tmp_path):
    write(tmp_path, *fresh(PLAIN, has_bias=True))
    found = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (found.decoder_start_token_id, found.eos_token_id, found.pad_token_id) == (0, 1, 0)
    assert found.max_length == LENGTH + 1
    assert found.suppress_tokens == list(TOKENS.unwritten)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = TOKENIZER.pieces("two red bars")
    assert tokenizer("two red bars", add_special_tokens=False).input_ids == ids
    assert tokenizer.decode([0, *ids, 1, 0, 0], skip_special_tokens=True) == "two red bars"
