"""Text models of Hugging Face as towers give the tokens and embeddings of transformers, with padding."""

import types

import numpy as np
import pytest
import safetensors.numpy

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.models.pretrained import abstract_params, load_weights
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.options import check_padding
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.t5 import distance_buckets
from lit_het.towers.text_config import BertConfig, ModernBertConfig, TextConfig
from lit_het.weights import formats
from lit_het.weights.huggingface.names import MODERN_BERT, named_arrays
from tests.golden.record_image_text import randomise
from tests.towers import models
from tests.towers.models import drawn
from tests.weights.importing import assert_close, golden, load, run, write_json

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
MASKED_LANGUAGE_MODEL = {"lm_head.bias": np.zeros(64, np.float32), "lm_head.dense.weight": np.zeros((24, 24))}


def texts(words, length, padding, *, longest):
    """Returns random texts of different lengths, the first of ``longest`` tokens, padded on the right."""
    random = np.random.default_rng(words)
    ids = random.integers(max(padding, 2) + 1, words, (4, length), np.int32)
    for text, count in zip(ids, (longest, 1, longest // 2, 2), strict=True):
        text[count:] = padding
    return ids


def mean_of(tokens, present):
    """Returns the mean of the tokens that are present, one text at a time."""
    return np.stack([rows[mask].mean(axis=0) for rows, mask in zip(np.asarray(tokens), present, strict=True)])


def as_roberta(arrays):
    """Returns BERT's arrays with RoBERTa's positions, of which the first two are not those of words."""
    name = "embeddings.position_embeddings.weight"
    arrays = arrays | {name: np.concatenate([np.full((2, 24), 7, np.float32), arrays[name]])}
    return {f"roberta.{key}": array for key, array in arrays.items()} | MASKED_LANGUAGE_MODEL


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_positions_of_a_roberta_begin_behind_that_of_padding(edited, kind):
    imported, params = load(edited("hf_bert", as_roberta, model_type=kind), text_length=8)
    io = golden("hf_bert/io")
    output = run(imported.text_tower, params["text_tower"], io["in/input_ids"])
    assert imported.text_tower.padding_id == 1
    assert_close(output.tokens, io["out/last_hidden_state"])
    assert_close(output.embedding, io["out/pooler_output"])


def sentence_model(folder, pooling, *more):
    types = ("Transformer", "Pooling", *more)
    write_json(folder / "modules.json", [{"type": f"sentence_transformers.models.{one}"} for one in types])
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 24, **modes})
    return folder


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_the_pooling_of_sentence_transformers_is_read_and_leaves_the_pooler_out(edited, pooling):
    imported, params = load(sentence_model(edited("hf_bert"), pooling, "Normalize"), text_length=8)
    io = golden("hf_bert/io")
    tokens, present = io["out/last_hidden_state"], io["in/attention_mask"] == 1
    output = run(imported.text_tower, params["text_tower"], io["in/input_ids"])
    assert_close(output.embedding, mean_of(tokens, present) if pooling == "mean_tokens" else tokens[:, 0])
    assert not imported.text_tower.pooler


def test_a_tower_starts_from_weights_with_the_pooling_that_it_names(edited):
    folder = str(edited("hf_bert", as_roberta, model_type="xlm-roberta"))
    tower = formats.text_tower(folder, text_length=8, text_pooling="mean")
    assert (tower.pooling, tower.weights) == ("mean", folder)
    assert formats.text_tower(folder, **tower.file_options()) == tower


@pytest.mark.parametrize(("name", "pooler"), [("hf_bert", True), ("hf_bert", False), ("hf_dual_encoder", True)])
def test_a_bert_starts_from_all_of_its_weights_and_from_none_without_a_pooler(edited, name, pooler):
    folder = edited(name)
    tower = formats.text_tower(str(folder), text_pooling=None if pooler else "first")
    assert tower.pooler is pooler

    def started(tower):
        image = ViTConfig(8, 8, EncoderConfig(8, 1, 8, 2), projection_size=tower.embedding_size)
        config = ContrastiveConfig(image, tower, locked=())
        shapes = abstract_params(config.build())
        found = load_weights(config, shapes)["text_tower"]
        assert parameters.flatten(found).keys() == parameters.flatten(shapes["text_tower"]).keys()
        return parameters.flatten(found)

    stored = parameters.flatten(load(folder, text_pooling=None if pooler else "first")[1]["text_tower"])
    for path, array in started(tower).items():
        np.testing.assert_array_equal(array, stored[path])
    if pooler:
        sentence_model(folder, "cls_token")
        with pytest.raises(UserError, match="has pooler = False, but this configuration has True; set"):
            started(tower)


@pytest.mark.parametrize(
    ("pooling", "more", "options", "message"),
    [
        ("max_tokens", (), {}, r"1_Pooling/config\.json: pooling_mode_max_tokens cannot be imported"),
        ("cls_token", ("Dense",), {}, r"modules\.json: a layer 'Dense' cannot be imported; leave it out by --text-p"),
        ("cls_token", (), {"text_pooling": "last"}, "text_pooling = 'last' is not one of 'bert'; choose 'first' or"),
    ],
)
def test_other_poolings_and_layers_behind_them_are_refused(edited, pooling, more, options, message):
    folder = sentence_model(edited("hf_bert"), pooling, *more)
    with pytest.raises(UserError, match=message):
        load(folder, **options)
    assert load(folder, text_pooling="mean")[0].text_tower.pooling == "mean"


@pytest.mark.parametrize("kind", ["electra", "deberta-v2", "llama"])
def test_a_text_model_of_another_kind_is_refused_by_its_name(edited, kind):
    with pytest.raises(UserError, match=rf"model_type = '{kind}' cannot be imported; supported are bert, .*xlm-rob"):
        load(edited("hf_bert", model_type=kind))


def test_a_tokenizer_that_pads_with_another_token_than_the_tower_masks_is_refused():
    for padding in (1, 0):
        tower = BertConfig(padding_id=padding)
        check_padding(tower, types.SimpleNamespace(padding_id=padding))
        with pytest.raises(UserError, match=rf"masks token {padding} as .* pads with 2; set --tokenizer.padding-id"):
            check_padding(tower, types.SimpleNamespace(padding_id=2))
    check_padding(TextConfig(), types.SimpleNamespace(padding_id=2))


@pytest.fixture
def compare(transformers, tmp_path):
    """Returns a function that compares tokens with those of a random model of transformers, to 1e-5."""
    torch = pytest.importorskip("torch")

    def compared(kind, model, fields, *, length, padding=1, longest=None, **options):
        theirs = randomise(torch, getattr(transformers, model)(transformers.AutoConfig.for_model(kind, **fields)))
        for name, parameter in theirs.named_parameters():
            if name.endswith("SelfAttention.q.weight"):  # T5 divides no logits, but begins with small queries
                parameter.data *= fields["d_kv"] ** -0.5
        theirs.save_pretrained(tmp_path, max_shard_size="50MB")
        imported, params = load(tmp_path, text_length=length, **options)
        ids = texts(imported.text_tower.vocabulary_size, length, padding, longest=longest or length)
        with torch.no_grad():
            found = theirs(torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(ids != padding))
        output, present = run(imported.text_tower, params["text_tower"], ids), ids != padding
        expected = np.asarray(found.last_hidden_state)
        scale = max(1, np.abs(expected[present]).max())
        assert_close(np.asarray(output.tokens)[present], expected[present], atol=1e-5 * scale)
        return imported, output, found, present

    return compared


SMALL = SIZES | {"vocab_size": 64, "max_position_embeddings": 18, "type_vocab_size": 1}
# Two layers of the published sizes.
TRUE = {
    "num_hidden_layers": 2,
    "vocab_size": 50_265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
TRUE_XLM = TRUE | {"vocab_size": 250_002}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "model", "fields", "length"),
    [
        ("roberta", "RobertaModel", SMALL, 16),
        ("xlm-roberta", "XLMRobertaModel", SMALL, 12),
        ("roberta", "RobertaModel", TRUE, 64),
        ("xlm-roberta", "XLMRobertaModel", TRUE_XLM, 32),
    ],
)
def test_roberta_and_xlm_r_give_the_embeddings_of_transformers(compare, kind, model, fields, length):
    imported, output, found, _ = compare(kind, model, fields, length=length)
    assert_close(output.embedding, found.pooler_output)
    assert imported.text_tower.pooler


T5 = {"d_model": 24, "num_layers": 2, "num_heads": 3, "d_kv": 8, "d_ff": 40, "vocab_size": 64}
# Two layers of the published sizes; mT5 small has heads that are wider than its tokens.
TRUE_T5 = {"d_model": 768, "num_layers": 2, "num_heads": 12, "d_kv": 64, "d_ff": 2048, "vocab_size": 32_128}
MT5_SMALL = {"d_model": 512, "num_layers": 2, "num_heads": 6, "d_kv": 64, "d_ff": 1024, "vocab_size": 250_112}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "model", "fields", "length"),
    [
        ("t5", "T5EncoderModel", T5, 12),
        ("t5", "T5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}, 140),
        ("mt5", "MT5EncoderModel", T5 | {"d_kv": 5, "relative_attention_max_distance": 20}, 40),
        ("t5", "T5EncoderModel", TRUE_T5 | {"feed_forward_proj": "gated-gelu"}, 64),
        ("mt5", "MT5EncoderModel", MT5_SMALL, 32),
    ],
)
def test_the_encoder_of_a_t5_gives_the_tokens_of_transformers_and_their_mean(compare, kind, model, fields, length):
    imported, output, found, present = compare(kind, model, fields, length=length, padding=0)
    expected = mean_of(found.last_hidden_state, present)
    assert_close(output.embedding, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    assert imported.text_tower.encoder.norm == "rms"


MODERN = SIZES | {"hidden_size": 48, "vocab_size": 64, "num_hidden_layers": 5, "pad_token_id": 3, "local_attention": 6}
SPECIAL = {name: 0 for name in ("eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id")}
TRUE_MODERN = {"num_hidden_layers": 4}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "fields", "length"),
    [
        ("ModernBertModel", MODERN | SPECIAL, 16),
        ("ModernBertModel", MODERN | SPECIAL | {"norm_bias": True, "attention_bias": True, "mlp_bias": True}, 40),
        ("ModernBertModel", TRUE_MODERN, 160),
    ],
)
def test_modernbert_gives_the_tokens_of_transformers(compare, model, fields, length):
    imported, output, found, _ = compare(
        "modernbert", model, fields, length=length, padding=fields.get("pad_token_id", 50_283)
    )
    assert_close(output.embedding, found.last_hidden_state[:, 0])
    assert imported.text_tower.global_every == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "fields", "length"),
    [
        ("t5", "T5ForConditionalGeneration", T5, 512),
        ("mt5", "MT5ForConditionalGeneration", T5, 512),
        ("modernbert", "ModernBertForMaskedLM", MODERN | SPECIAL, 8192),
        ("xlm-roberta", "XLMRobertaForMaskedLM", SMALL, 16),
    ],
)
def test_what_a_language_model_has_behind_its_encoder_is_left_out(transformers, tmp_path, kind, name, fields, length):
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **fields))
    model.save_pretrained(tmp_path)
    imported, params = load(tmp_path)
    assert imported.text_tower.length == length
    theirs = model.get_input_embeddings().weight.detach()
    np.testing.assert_array_equal(params["text_tower"]["tokens"]["embedding"], theirs)


def old_modernbert(folder, **changes):
    """Writes a configuration as before transformers 5, beside no arrays."""
    fields = {"model_type": "modernbert", "global_attn_every_n_layers": 2, "local_rope_theta": 50.0, **changes}
    write_json(folder / "config.json", MODERN | fields)
    ours = ModernBertConfig(64, 16, None, EncoderConfig(48, 5, 40, 3, activation="geglu", first_norm=False))
    arrays = named_arrays(MODERN_BERT, "", "", parameters.flatten(drawn(models.shapes(ours))))
    arrays = {name: array for name, array in arrays.items() if not name.endswith("bias")}
    del arrays["layers.0.attn_norm.weight"]
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def test_a_modernbert_of_transformers_4_is_read_with_its_own_kinds_of_blocks(tmp_path):
    tower = load(old_modernbert(tmp_path), text_length=9)[0].text_tower
    assert (tower.global_every, tower.local_base, tower.global_base, tower.window) == (2, 50.0, 160_000.0, 6)
    kinds = ["full_attention", *["sliding_attention"] * 4]
    assert load(old_modernbert(tmp_path, layer_types=kinds), text_length=9)[0].text_tower.global_every == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 3]}, "are not regular"),
        ({"layer_types": "full_attention"}, "are not regular"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "of full_attention other than rope_type = 'd"),
        ({"rope_scaling": {"factor": 2}}, "other than rope_type = 'default' are not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not 'gelu'"),
    ],
)
def test_other_forms_of_modernbert_are_refused_by_the_name_of_the_field(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load(old_modernbert(tmp_path, **changes), text_length=9)


def test_a_t5_with_another_mlp_is_refused(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "t5", "feed_forward_proj": "gated-silu"})
    safetensors.numpy.save_file({"shared.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="feed_forward_proj = 'gated-silu' is not supported; choose from relu, gated-g"):
        load(tmp_path)


def test_distances_have_the_buckets_of_transformers(transformers):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(600)[None] - torch.arange(600)[:, None]
    for number, most in ((32, 128), (32, 100), (8, 20), (64, 1000)):
        theirs = T5Attention._relative_position_bucket(distance, num_buckets=number, max_distance=most)
        np.testing.assert_array_equal(distance_buckets(600, number, most), theirs)
