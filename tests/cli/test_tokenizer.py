"""`lit-het tokenizer train` on the captions of shards."""

import itertools

import numpy as np
import pytest

from lit_het.apps import tokenizer
from lit_het.cli.main import main
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.tokenizers import SentencePieceConfig, SentencePieceTokenizer, train_sentencepiece
from tests.cli.conftest import refusal

CAPTIONS = ["a red bar", "a blue square", "a green bar\na GREEN stripe", "grey squares"]
LINES = [line for caption in CAPTIONS for line in caption.split("\n")]


@pytest.fixture
def shards(tmp_path):
    image = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    members = [{"jpg": image, "txt": caption, "json": {"words": caption.split()}} for caption in CAPTIONS]
    samples = [{"__key__": f"{i:03}", **sample} for i, sample in enumerate([*members, {"jpg": image, "txt": " "}])]
    write_shards(tmp_path / "train", samples, samples_per_shard=2)
    return tmp_path / "train"


def trained(*arguments):
    assert main(["tokenizer", "train", *map(str, arguments)]) == 0


def test_the_model_is_that_of_all_captions(capsys, shards, tmp_path):
    output = tmp_path / "tokenizer.model"
    trained(shards, "--size", 40, "--output", output)
    assert output.read_bytes() == train_sentencepiece(LINES, vocabulary_size=40, model_type="bpe")
    built = SentencePieceConfig(output, length=12).build()
    assert [text.strip() for text in built.decode(built(["A green square"]))] == ["a green square"]
    printed = capsys.readouterr().err
    assert "1 of 5 samples have no caption in .txt and are left out" in printed
    assert (
        f"--tokenizer.model {output} --tokenizer.length 8, and the same length and {built.vocabulary_size}" in printed
    )
    assert "8 tokens cut 0.0% of the captions" in printed


def test_characters_of_long_captions_are_covered():
    model = train_sentencepiece([*LINES, "a long caption " * 600 + "犬"], vocabulary_size=60, model_type="bpe")
    assert SentencePieceTokenizer(model, length=8).decode(SentencePieceTokenizer(model, length=8)(["犬"])) == ["犬"]


def test_a_model_of_two_languages_keeps_capitals(capsys, tmp_path):
    pairs = [("The house", "Das Haus"), ("the red house", "das rote Haus")]
    samples = [{"__key__": f"{i}", "json": {"en": one, "de": other}} for i, (one, other) in enumerate(pairs)]
    write_shards(tmp_path / "train", samples)
    output = tmp_path / "tokenizer.model"
    trained(tmp_path / "train", "--size", 40, "--output", output, "--captions", "json/en", "json/de", "--keep-case")
    lines = [text for side in zip(*pairs, strict=True) for text in side]
    assert output.read_bytes() == train_sentencepiece(lines, vocabulary_size=40, model_type="bpe", lowercase=False)
    built = SentencePieceConfig(output, length=32, lowercase=False).build()
    assert built.decode(built(["The Haus"])) == ["The Haus"]
    assert "--tokenizer.length 8 --tokenizer.no-lowercase, and" in capsys.readouterr().err


def test_questions_and_their_answers_are_read(tmp_path):
    asked = [{"question": "how many?", "answers": ["one", "two"]}, {"question": "red?", "answers": []}]
    write_shards(tmp_path / "train", [{"__key__": "0", "json": {"questions": asked}}])
    output = tmp_path / "tokenizer.model"
    trained(tmp_path / "train", "--size", 30, "--output", output, "--captions", "json/questions")
    lines = ["how many?", "one", "two", "red?"]
    assert output.read_bytes() == train_sentencepiece(lines, vocabulary_size=30, model_type="bpe")


def test_the_proposed_length_cuts_few_captions(tmp_path):
    image = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    captions = ["red " * (3 + 9 * (number % 150 == 0)) for number in range(300)]
    samples = [{"__key__": f"{i:03}", "jpg": image, "txt": text} for i, text in enumerate(captions)]
    write_shards(tmp_path / "train", samples, samples_per_shard=300)
    found = tokenizer.train_tokenizer([str(tmp_path / "train")], ["txt"], 30, tmp_path / "tokenizer.model")
    assert (found.length, found.cut) == (8, 2 / 300)


def test_captions_of_a_json_list_are_read_and_the_file_is_replaced(shards, tmp_path):
    output = tmp_path / "tokenizer.model"
    output.write_text("an older one")
    trained(shards, "--size", 30, "--output", output, "--captions", "json/words")
    words = [word for caption in CAPTIONS for word in caption.split()]
    assert output.read_bytes() == train_sentencepiece(words, vocabulary_size=30, model_type="bpe")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_of_many_samples_some_are_read_evenly_spread(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_SAMPLES", 2)
    trained(shards, "--size", 30, "--output", tmp_path / "tokenizer.model")
    expected = train_sentencepiece([CAPTIONS[0], *LINES[2:4]], vocabulary_size=30, model_type="bpe")
    assert (tmp_path / "tokenizer.model").read_bytes() == expected


def test_what_cannot_be_trained_is_one_line_and_leaves_no_file(capsys, shards, tmp_path):
    output = tmp_path / "tokenizer.model"
    for flags, expected in (
        (("--output", tmp_path), "must be a file in an existing folder"),
        (("--output", tmp_path / "nowhere" / "x"), "must be a file in an existing folder"),
    ):
        assert expected in refusal(capsys, "tokenizer", "train", shards, *flags)
    missing = refusal(capsys, "tokenizer", "train", tmp_path / "none", "--output", output)
    assert "no tar file matches" in missing
    assert main(["tokenizer", "train", str(shards), "--output", str(output), "--captions", "json/text"]) == 1
    assert "no sample has a caption in .json/text" in capsys.readouterr().err.splitlines()[-1]
    assert main(["tokenizer", "train", str(shards), "--output", str(output), "--size", "3"]) == 1
    assert "a vocabulary of 3 pieces cannot be trained" in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()


def never_trained(size, known, new):
    """Returns the share of the tokens of new captions that no known caption has."""
    built = SentencePieceTokenizer(train_sentencepiece(known, vocabulary_size=size, model_type="bpe"), length=1)
    seen = {piece for caption in known for piece in built.pieces(caption)}
    return np.mean([piece not in seen for caption in new for piece in built.pieces(caption)])


def test_few_captions_get_a_vocabulary_whose_pieces_new_captions_share(capsys):
    random = np.random.default_rng(0)
    names = ["".join(random.choice(list("abcdefghijklmnop"), 6)) for _ in range(200)]
    known, new = [f"a {name}" for name in names[:100]], [f"a {name}" for name in names[100:]]
    size = tokenizer.size_seen_often(known * 10, 8_000, lowercase=True)
    assert 32 <= size <= 250
    assert "of the tokens of new captions would be rare (in fewer than 5 others)" in capsys.readouterr().err
    before, after = never_trained(8_000, known, new), never_trained(size, known, new)
    assert before > 0.2
    assert after < 0.01


def test_captions_of_few_words_in_many_orders_keep_the_size_that_is_asked_for():
    words = ["red", "green", "blue", "bar", "square", "stripe"]
    captions = [" ".join(order) for order in itertools.permutations(words, 4)]
    assert tokenizer.size_seen_often(captions, 8_000, lowercase=True) == 8_000
