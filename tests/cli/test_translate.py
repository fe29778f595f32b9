"""A translation model learns to reverse words: from shards without images to `lit-het translate`."""

import dataclasses
import io
import shutil
import sys

import numpy as np
import pytest

import lit_het
from lit_het.apps.demo.model import open_model
from lit_het.cli.main import main
from lit_het.configs import translation_base
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.tokenizers import SentencePieceConfig, train_sentencepiece
from lit_het.errors import UserError
from lit_het.eval.decoder_suite import WriteCaptionsConfig
from lit_het.eval.sets.folders import unlabelled
from lit_het.sharding import MeshConfig
from lit_het.tasks.translation import TranslationConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.optimizers import AdamW, Optimizer
from lit_het.training.schedules import ReverseSquareRoot, Schedule
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import last_line, printed, refusal, run_command

WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma")
LENGTH = 8
STEPS = 300


def sentences(count, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 5))) for _ in range(count)]


def reverse(text):
    return " ".join(text.split()[::-1])


def write(folder, texts, **changes):
    samples = [
        {"__key__": f"{number:04d}", "json": {"source": text, "target": reverse(text)}, **changes.get(str(number), {})}
        for number, text in enumerate(texts)
    ]
    write_shards(folder, samples)
    return folder


def config_of(root) -> ExperimentConfig:
    """Returns the shipped recipe, cut to a width of 64 and words."""
    config = translation_base.get_config()
    task = config.task
    assert isinstance(task, TranslationConfig)

    def cut(tower):
        sizes = {"width": 64, "depth": 1, "mlp_width": 128, "num_heads": 4, "compute_type": "float32", "unrolled": True}
        encoder = dataclasses.replace(tower.encoder, **sizes)
        return dataclasses.replace(tower, vocabulary_size=32, length=LENGTH, encoder=encoder, dropout=0.0)

    task = dataclasses.replace(task, text_tower=cut(task.text_tower), decoder=cut(task.decoder))
    shards = (str(root / "train"),)
    data = dataclasses.replace(
        config.data,
        shards=shards,
        batch_size=32,
        source="json/source",
        captions="json/target",
        threads=1,
        max_bad_fraction=0.0,
    )
    [evaluation] = config.evaluations
    assert isinstance(evaluation, WriteCaptionsConfig)
    how = dataclasses.replace(evaluation.generation, num_tokens=LENGTH)
    data_set = dataclasses.replace(unlabelled(str(root / "test"), "reversed"), batch_size=16)
    evaluation = dataclasses.replace(evaluation, data=data_set, captions="json/target", generation=how)
    return dataclasses.replace(
        config,
        run_dir=root / "run",
        task=task,
        data=data,
        tokenizer=SentencePieceConfig(root / "tokenizer.model", LENGTH),
        length=Duration(STEPS),
        optimizer=Optimizer(AdamW(second_decay=0.98, epsilon=1e-9), weight_decay=0.0),
        schedule=Schedule(5e-3, Duration(20), decay=ReverseSquareRoot(Duration(100), cooldown=Duration(200))),
        mesh=MeshConfig(),
        cadence=Cadence(log_steps=50, save_steps=STEPS),
        evaluations=(evaluation,),
    )


@pytest.fixture(scope="module")
def trained(once):
    """The configuration of a trained run; tests only read it."""

    def make(root):
        write(root / "train", sentences(2000, seed=1))
        write(root / "test", sentences(64, seed=2))
        vocabulary = train_sentencepiece(list(WORDS) * 20, vocabulary_size=32, model_type="word")
        (root / "tokenizer.model").write_bytes(vocabulary)
        train(config_of(root))

    return config_of(once("cli_translation", make))


@pytest.fixture(scope="module")
def model(trained):
    return lit_het.load(trained.run_dir)


def test_training_evaluates_translations(trained):
    last = {name: value for record in read_metrics(trained.run_dir / "metrics.jsonl") for name, value in record.items()}
    found = {name.rpartition("/")[2]: value for name, value in last.items() if "captioning" in name}
    assert found["exact_match"] > 0.9
    assert found["bleu4"] > 0.9
    # The smoothed loss teaches no probability of 1.
    assert found["log_perplexity"] < 0.4


@pytest.mark.slow
def test_python_and_the_command_translate_lines_that_end_only_where_the_file_says_so(
    trained, model, capsys, monkeypatch
):
    assert repr(model).startswith(f"<Model {trained.run_dir}: decoder")
    texts = sentences(40)
    found = model.translate(texts)
    assert np.mean([best.text == reverse(text) for text, (best, *_) in zip(texts, found, strict=True)]) > 0.9
    assert all(len(beams) == 4 for beams in found)
    assert model.translate(texts[3])[0].text == found[3][0].text
    lines = f"{texts[0]}\n\n{texts[1]}\nalpha\u2028beta\x0bgamma\r\nbeta\n"
    monkeypatch.setattr(sys, "stdin", standard_input(lines.encode()))
    capsys.readouterr()
    run_command("translate", "-", "--checkpoint", trained.run_dir)
    out = capsys.readouterr().out
    assert out.startswith(f"{found[0][0].text}\n\n{found[1][0].text}\n")
    assert len(out.splitlines()) == 5
    command = ("translate", texts[0], "--checkpoint", trained.run_dir, "--num-texts", 2, "--json")
    [row] = printed(capsys, *command)
    assert row["source"] == texts[0]
    assert [len(row["texts"]), row["texts"][0]["text"]] == [2, found[0][0].text]


def standard_input(content):
    return io.TextIOWrapper(io.BytesIO(content))


def test_what_is_not_utf_8_and_further_texts_beside_the_standard_input_are_one_line(trained, capsys, monkeypatch):
    line = ["translate", "-", "--checkpoint", str(trained.run_dir)]
    monkeypatch.setattr(sys, "stdin", standard_input(b"alpha\n\xff\n"))
    assert "standard input, line 2: not UTF-8" in refusal(capsys, *line)
    assert "leave it or the other texts out" in refusal(capsys, *line[:2], "alpha", *line[2:])


@pytest.mark.slow
def test_a_sample_is_one_unless_more_are_asked_for(model):
    assert len(model.translate("alpha beta", temperature=2.0)) == 1
    assert len(model.translate("alpha beta", temperature=2.0, num_texts=3)) == 3


def test_shards_of_texts_are_checked_as_training_reads_them(tmp_path, capsys):
    folder = write(tmp_path / "texts", ["alpha", "beta"], **{"1": {"json": {"target": "x"}}})
    check = ["data", "check", str(folder), "--source", "json/source", "--captions", "json/target"]
    assert main(check) == 1
    assert "nothing in .json/source" in capsys.readouterr().out
    write(tmp_path / "good", ["alpha", "beta"])
    assert main([*check[:2], str(tmp_path / "good"), *check[3:]]) == 0
    assert main([*check[:2], str(tmp_path / "good"), "--source", "json/source"]) == 0


@pytest.mark.slow
def test_evaluations_and_reports_need_no_images(trained, tmp_path, capsys):
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    line = ("--checkpoint", run, "--data", f"again={trained.run_dir.parent / 'test'}", "--captions", "json/target")
    run_command("captioning", *line)
    assert "exact_match" in capsys.readouterr().out
    run_command("report", run)
    page = (run / "report.html").read_text()
    assert "for the whole text" in page


@pytest.mark.slow
def test_its_tokens_are_calibrated_on_other_texts(trained, model, tmp_path, capsys):
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    write(tmp_path / "others", sentences(150))
    assert main(["calibrate", str(run), "--data", str(tmp_path / "others")]) == 0
    assert "150 texts" in capsys.readouterr().out
    text = sentences(1)[0]
    # Greedily: a temperature may change which text of a beam is the best.
    [best], [as_trained] = (one.translate(text, num_texts=1) for one in (lit_het.load(run), model))
    assert best.text == as_trained.text
    assert best.log_p != as_trained.log_p


def test_a_saved_model_translates_the_same(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    assert "pipeline_tag: translation" in (tmp_path / "saved" / "README.md").read_text()
    [one, other] = (some.translate("alpha beta") for some in (model, lit_het.load(tmp_path / "saved")))
    assert one == other


def test_what_a_translation_model_cannot_do_is_said_in_one_line(trained, model, tmp_path, capsys):
    run, image = trained.run_dir, np.zeros((8, 8, 3), np.uint8)
    for call in (model.caption, model.encode_images, lambda image: model.classify(image, ["a", "b"])):
        with pytest.raises(UserError, match="translates texts, and reads no images; use translate"):
            call(image)
    for texts, options, message in (
        (
            ["alpha", " ".join(WORDS[:5] * 2)],
            {},
            r"text 2, 'alpha beta .*', has 11 tokens, .* included, and 8 are read",
        ),
        (["alpha", " "], {}, r"texts\[1\] = ' ' is blank; leave it out"),
        ("alpha", {"num_texts": 10**9}, "num_texts = 1000000000 is more than 4096"),
        ("alpha", {"samples": 10**9}, "samples = 1000000000 must be from 0 to 10,000"),
        ([], {}, "no texts; give at least one"),
    ):
        with pytest.raises(UserError, match=message):
            model.translate(texts, **options)
    assert "no text to translate" in refusal(capsys, "translate", " ", "--checkpoint", run)
    assert "--to huggingface does not write a text decoder on a text encoder" in refusal(
        capsys, "export", "--checkpoint", run, "--to", "huggingface", "--output", tmp_path / "out"
    )
    labelled = tmp_path / "labelled"
    for folder in (labelled, labelled / "train"):
        write(folder, sentences(4), **{str(number): {"cls": number % 2} for number in range(4)})
    (labelled / "classnames.txt").write_text("odd\neven\n")
    for command in ("few-shot", "linear-probe"):
        line = [command, "--checkpoint", run, "--data", f"set={labelled}", "--split", ".", "--train-split", "train"]
        assert "need an image tower, and the model translates texts" in refusal(capsys, *line)
    line = last_line(capsys, "retrieval", "--checkpoint", run, "--data", f"set={labelled}", "--captions", "json/target")
    assert "retrieval needs an image-text model" in line
    assert "the model has no image tower: it translates texts" in refusal(
        capsys, "embed", "--tower", run, "--output", tmp_path / "embeddings"
    )
    with pytest.raises(UserError, match="the demo shows images; use lit-het translate"):
        open_model(trained.run_dir, None)


def test_sources_are_read_beside_their_translations(trained):
    assert trained.tokenizer is not None
    tokenizer = trained.tokenizer.build()
    batch = next(Loader(trained.data, tokenizer).epoch(4))
    assert batch.image is None
    sources = tokenizer.decode(batch.source)
    assert [reverse(text) for text in sources] == tokenizer.decode(batch.text)
    assert ((batch.source == tokenizer.end_id).sum(axis=1) == 1).all()
    alone = next(Loader(trained.data, tokenizer, has_captions=False).epoch(4))
    np.testing.assert_array_equal(alone.source, batch.source)
    assert alone.text is None


def test_a_source_that_is_missing_or_too_long_is_a_broken_sample(trained, tmp_path):
    tokenizer = trained.tokenizer.build()
    texts = ["alpha beta", "beta alpha", "gamma"]
    broken = {
        "missing": {"json": {"target": "x"}},
        "list": {"json": {"source": ["a"], "target": "x"}},
        "long": {"json": {"source": "alpha " * 8, "target": "x"}},
    }
    reasons = {
        "missing": "nothing in .json/source",
        "list": "not text, but of type list",
        "long": "source too long",
    }
    for name, change in broken.items():
        shards = (str(write(tmp_path / name, texts, **{"1": change})),)
        strict = dataclasses.replace(trained.data, shards=shards)
        with pytest.raises(UserError, match=reasons[name]):
            next(Loader(strict, tokenizer).epoch(4))
        batch = next(Loader(dataclasses.replace(strict, max_bad_fraction=0.5), tokenizer).epoch(4))
        assert batch.valid.tolist() == [True, False, True, False]
    with pytest.raises(UserError, match=r"no \.xml"):
        Loader(dataclasses.replace(trained.data, source="xml"), tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": None}}, "set --data.source"),
        ({"data": {"prompt": None}}, "set `data.prompt`"),
        ({"text_tower": {"length": 9}}, "the text tower has length 9"),
        ({"text_tower": {"padding_token": 1}}, "text-tower.padding-token 1 is not the padding of the tokenizer, 0"),
        # Padding that stands for something else.
        *(
            (
                {"text_tower": {"padding_token": token}, "tokenizer": {"padding_id": token}},
                f"the padding of the tokenizer, {token}, is also its end",
            )
            for token in (1, 2)
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_before_training(trained, tmp_path, changes, message):
    task = trained.task
    tower = dataclasses.replace(task.text_tower, **changes.get("text_tower", {}))
    config = dataclasses.replace(
        trained,
        run_dir=tmp_path / "run",
        task=dataclasses.replace(task, text_tower=tower),
        data=dataclasses.replace(trained.data, **changes.get("data", {})),
        tokenizer=dataclasses.replace(trained.tokenizer, **changes.get("tokenizer", {})),
    )
    with tiny.untrained(), pytest.raises(UserError, match=message):
        train(config)


def test_stored_embeddings_have_no_place_beside_sources(trained):
    with pytest.raises(UserError, match="`source` is read in place of images"):
        dataclasses.replace(trained.data, embeddings="folder")
