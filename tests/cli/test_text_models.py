"""Runs start from text models of Hugging Face, with a projection of their own, and find them again."""

import dataclasses

import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.models.opening import open_run
from lit_het.weights import formats
from tests import tiny
from tests.cli.conftest import changed
from tests.towers import models

BERT_LIKE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
T5 = {"d_model": 24, "num_layers": 2, "num_heads": 3, "d_kv": 5, "d_ff": 40}
SPECIAL = dict.fromkeys(("eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1)
MODELS = {
    "mt5": ("MT5EncoderModel", T5),
    "modernbert": ("ModernBertModel", BERT_LIKE | SPECIAL),
    "xlm-roberta": ("XLMRobertaModel", BERT_LIKE | {"max_position_embeddings": 10, "type_vocab_size": 1}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_on_a_text_model_finds_its_locked_parameters_again(lit_config, tmp_path, kind):
    pytest.importorskip("torch")
    import transformers

    name, fields = MODELS[kind]
    of_kind = transformers.AutoConfig.for_model(kind, vocab_size=64, pad_token_id=0, **fields)
    getattr(transformers, name)(of_kind).save_pretrained(tmp_path / "weights")
    tower = formats.text_tower(str(tmp_path / "weights"), text_length=6, text_pooling="mean")
    config = changed(lit_config, task__text_tower=dataclasses.replace(tower, projection_size=64))
    config = changed(config, task__locked=("text_tower/encoder/.*",))
    tiny.finish_untrained(config)
    found = parameters.flatten(open_run(config.run_dir).params["text_tower"])
    source = formats.open_weights(str(tmp_path / "weights"), **tower.file_options())
    read = parameters.flatten(formats.load_part(source, "text_tower", models.shapes(tower)))
    for path, array in read.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    with pytest.raises(UserError, match="masks token 0 as padding, but the tokenizer pads with 1"):
        tiny.finish_untrained(changed(config, tokenizer__padding_id=1, run_dir=tmp_path / "other"))
