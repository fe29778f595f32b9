"""What a decoder is given and what it learns: prompts, captions, questions with their answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, number_tokens, take
from tests.refusals import assert_refused

SENTENCES = ["caption: a red word0 on blue", "which colour? red", "how many? two 2"]
WORDS = [*SENTENCES, *(f"word{i}" for i in range(NUM_SAMPLES))]
MODEL = train_sentencepiece(WORDS * 20, vocabulary_size=60, model_type="word")
TOKENIZER = SentencePieceTokenizer(MODEL, length=6)
QUESTIONS = [
    {"id": 1, "question": "which colour? ", "answers": ["red", "red", "blue"]},
    {"id": 2, "question": "how many?", "answers": ["two", " "]},
]


def config(*shards: Path, **fields) -> LoaderConfig:
    own = {"image_size": IMAGE_SIZE, "batch_size": 8, "threads": 0, "caption_unit": "line", **fields}
    return LoaderConfig(tuple(map(str, shards)), **own)


@pytest.fixture
def questions(tmp_path: Path, make_shards: Callable[..., Path]) -> Path:
    """A shard whose images have questions, and no captions."""
    changed = {f"s{i}": {"json": {"questions": QUESTIONS}} for i in range(NUM_SAMPLES)}
    return make_shards(tmp_path / "questions", **changed)


def words(batch) -> list[tuple[str, str]]:
    """Returns the words of each row before and in what is learned, with the end token as ``.``."""
    pieces = [TOKENIZER._processor.IdToPiece(number) for number in range(TOKENIZER.vocabulary_size)]
    pieces[TOKENIZER.end_id] = "."
    found = []
    for ids, target in zip(batch.text, batch.text_target, strict=True):
        learned = [pieces[i].replace("▁", "") for i in ids[target]]
        before = [pieces[i].replace("▁", "") for i in ids[: np.argmax(target)]]
        assert (ids[np.argmax(target) + len(learned) :] == TOKENIZER.padding_id).all()
        found.append((" ".join(before), " ".join(learned)))
    return found


def test_a_prompt_is_given_and_the_caption_and_its_end_are_learned(shards):
    for prompt in ("caption:", ""):
        batch = next(Loader(config(shards, prompt=prompt), TOKENIZER).epoch(4))
        assert words(batch) == [(prompt, f"word{i} .") for i in range(4)]


def test_without_a_prompt_texts_are_those_of_a_text_tower(shards):
    batch = next(Loader(config(shards), TOKENIZER).epoch(4))
    assert batch.text_target is None
    np.testing.assert_array_equal(batch.text, TOKENIZER([f"word{i}" for i in range(4)]))


def test_one_of_all_answers_is_drawn_in_training_and_the_first_taken_in_evaluation(questions):
    loader = Loader(config(questions, captions="json/questions", prompt="{question}"), TOKENIZER)
    assert set(words(next(loader.epoch(8)))) == {("which colour?", "red .")}
    drawn = [row for batch in take(loader, 60) for row in words(batch)]
    shares = {row: drawn.count(row) / len(drawn) for row in set(drawn)}
    assert shares == {
        ("which colour?", "red ."): pytest.approx(1 / 2, abs=0.1),
        ("which colour?", "blue ."): pytest.approx(1 / 4, abs=0.1),
        ("how many?", "two ."): pytest.approx(1 / 4, abs=0.1),
    }


def test_a_mixture_has_its_own_texts_and_prompts_even_of_the_same_shards(questions):
    asked = WeightedShards((str(questions),), captions="json/questions", prompt="{question}")
    loader = Loader(config(questions, prompt="caption:", mixture=(asked,)), TOKENIZER)
    assert loader.num_samples == 2 * NUM_SAMPLES
    prompts = [row[0] for batch in take(loader, 6) for row in words(batch)]
    assert prompts.count("caption:") == len(prompts) / 2
    assert set(prompts) == {"caption:", "which colour?", "how many?"}


def test_samples_lack_only_the_member_of_their_own_data_set(shards, tmp_path):
    without = [{"__key__": "a", "jpg": b"x", "json": {"questions": QUESTIONS}}, {"__key__": "b", "jpg": b"x"}]
    write_shards(tmp_path / "mixed", without)
    more = WeightedShards((str(tmp_path / "mixed"),), captions="json/questions", prompt="{question}")
    loader = Loader(config(shards, prompt="", mixture=(more,), max_bad_fraction=0.5), TOKENIZER)
    assert loader.faults.causes == {"no .json": 1}
    assert loader.num_samples == NUM_SAMPLES + 1


def test_long_texts_are_cut_before_their_end_token():
    ids, target = TOKENIZER.prompted(["which colour?"], ["red blue a on two 2 2 2"])
    assert target[0].tolist() == [False, False, True, True, True, True]
    assert ids[0, -1] == TOKENIZER.end_id


@pytest.mark.parametrize(
    ("content", "prompt", "cause"),
    [
        ({"questions": [{"question": "how many?", "answers": []}]}, "{question}", "no answer"),
        ({"questions": [{"question": "how many?"}]}, "{question}", "not a question"),
        ({"questions": ["how many?"]}, "{question}", "not a question"),
        ({"questions": 5}, "{question}", "not a question"),
        ({"other": []}, "{question}", "nothing in .json/questions"),
        ({"questions": QUESTIONS}, "a red word0 on {question}", "prompt too long"),
    ],
)
def test_what_cannot_be_asked_is_counted_by_its_cause(tmp_path, make_shards, content, prompt, cause):
    directory = make_shards(tmp_path, **{f"s{i}": {"json": content} for i in range(NUM_SAMPLES)})
    loader = Loader(config(directory, captions="json/questions", prompt=prompt, max_bad_fraction=1.0), TOKENIZER)
    assert not next(loader.epoch(8)).valid.any()
    assert set(loader.faults.causes) == {cause}


def test_configurations_that_do_not_fit_are_refused(shards):
    message = r"data.prompt is for decoders, whose tokenizer is a SentencePieceConfig"
    assert_refused(message, Loader, config(shards, prompt=""), number_tokens)
    message = r"a data set of the mixture has a `prompt`; give the others one, '' for none"
    assert_refused(message, config, shards, mixture=(WeightedShards((str(shards),), prompt="x"),))
    fields = {"text_embeddings": "x", "mixture": (WeightedShards((str(shards),), captions="json/caption"),)}
    assert_refused(r"text_embeddings are of one kind of `captions`", config, shards, **fields)
    message = r"the prompt .* has 6 tokens, too many for 6; shorten it"
    assert_refused(message, TOKENIZER.prompted, ["a red word0 on blue two"], ["red"])
