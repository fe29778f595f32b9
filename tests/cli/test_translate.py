"""A translation model learns to reverse words: from shards without images to `lit-het translate`."""

import dataclasses
import io
import json
import shutil
import sys

import numpy as np
import pytest

import lit_het
from lit_het.apps.demo.model import open_model
from lit_het.cli.main import main
from lit_het.configs import translation_base
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.loader import Loader
from lit_het.data_pipelines.shards import write_shards
from lit_het.data_pipelines.tokenizers import SentencePieceConfig, train_sentencepiece
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.eval.decoder_suite import WriteCaptionsConfig
from lit_het.eval.sets import unlabelled
from lit_het.optimizers import AdamW, Optimizer
from lit_het.runs.training import train
from lit_het.schedules import ReverseSquareRoot, Schedule
from lit_het.sharding import MeshConfig
from lit_het.tasks.translation import TranslationConfig
from lit_het.training.loop import Cadence
from tests import tiny
from tests.cli.test_train import refusal

WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma")
LENGTH = 8
RANDOM = np.random.default_rng(0)


def sentences(count):
    return [" ".join(RANDOM.choice(WORDS, RANDOM.integers(1, 5))) for _ in range(count)]


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
    task, warmup = config.task, Duration(60)
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
        batch_size=64,
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
        length=Duration(300),
        optimizer=Optimizer(AdamW(second_decay=0.98, epsilon=1e-9), weight_decay=0.0),
        schedule=Schedule(3e-3, warmup, decay=ReverseSquareRoot(warmup)),
        mesh=MeshConfig(),
        cadence=Cadence(log_steps=50, save_steps=300),
        evaluations=(evaluation,),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("translation")
    train_texts, test_texts = sentences(2000), sentences(64)
    write(root / "train", train_texts)
    write(root / "test", test_texts)
    (root / "tokenizer.model").write_bytes(train_sentencepiece(list(WORDS) * 20, vocabulary_size=32, model_type="word"))
    config = config_of(root)
    train(config)
    return config


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_training_evaluates_translations(trained):
    last = {name: value for record in records(trained.run_dir) for name, value in record.items()}
    found = {name.rpartition("/")[2]: value for name, value in last.items() if "captioning" in name}
    assert found["exact_match"] > 0.9
    assert found["bleu4"] > 0.9
    # The smoothed loss teaches no probability of 1.
    assert found["log_perplexity"] < 0.4


def test_python_and_the_command_translate(trained, capsys, monkeypatch):
    model = lit_het.load(trained.run_dir)
    assert repr(model).startswith(f"<Model {trained.run_dir}: decoder")
    texts = sentences(40)
    found = model.translate(texts)
    assert np.mean([best.text == reverse(text) for text, (best, *_) in zip(texts, found, strict=True)]) > 0.9
    assert all(len(beams) == 4 for beams in found)
    assert model.translate(texts[3])[0].text == found[3][0].text
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", standard_input(f"{texts[0]}\n\n{texts[1]}\n".encode()))
    assert main(["translate", "-", "--checkpoint", str(trained.run_dir)]) == 0
    assert capsys.readouterr().out == f"{found[0][0].text}\n\n{found[1][0].text}\n"
    assert main(["translate", texts[0], "--checkpoint", str(trained.run_dir), "--num-texts", "2", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["source"] == texts[0]
    assert [len(row["texts"]), row["texts"][0]["text"]] == [2, found[0][0].text]


def standard_input(content):
    return io.TextIOWrapper(io.BytesIO(content))


def test_a_line_ends_only_where_the_file_says_so(trained, capsys, monkeypatch):
    line = ["translate", "-", "--checkpoint", str(trained.run_dir)]
    monkeypatch.setattr(sys, "stdin", standard_input("alpha\u2028beta\x0bgamma\r\nbeta\n".encode()))
    assert main(line) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(sys, "stdin", standard_input(b"alpha\n\xff\n"))
    assert "standard input, line 2: not UTF-8" in refusal(capsys, *line)
    assert "leave it or the other texts out" in refusal(capsys, *line[:2], "alpha", *line[2:])


def test_a_sample_is_one_unless_more_are_asked_for(trained):
    model = lit_het.load(trained.run_dir)
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


def test_evaluations_and_reports_need_no_images(trained, capsys):
    line = ["--checkpoint", trained.run_dir, "--data", f"again={trained.run_dir.parent / 'test'}"]
    assert main(["captioning", *map(str, line), "--captions", "json/target"]) == 0
    assert "exact_match" in capsys.readouterr().out
    assert main(["report", str(trained.run_dir)]) == 0
    page = (trained.run_dir / "report.html").read_text()
    assert "for the whole text" in page


def test_its_tokens_are_calibrated_on_other_texts(trained, tmp_path, capsys):
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    write(tmp_path / "others", sentences(150))
    assert main(["calibrate", str(run), "--data", str(tmp_path / "others")]) == 0
    assert "150 texts" in capsys.readouterr().out
    text = sentences(1)[0]
    [best, *_], [as_trained, *_] = (
        lit_het.load(run, calibrated=calibrated).translate(text) for calibrated in (True, False)
    )
    assert best.text == as_trained.text
    assert best.log_p != as_trained.log_p


def test_a_saved_model_translates_the_same(trained, tmp_path):
    model = lit_het.load(trained.run_dir)
    model.save_pretrained(tmp_path / "saved")
    assert "pipeline_tag: translation" in (tmp_path / "saved" / "README.md").read_text()
    [one, other] = (some.translate("alpha beta") for some in (model, lit_het.load(tmp_path / "saved")))
    assert one == other


def test_what_a_translation_model_cannot_do_is_said_in_one_line(trained, tmp_path, capsys):
    model, run = lit_het.load(trained.run_dir), str(trained.run_dir)
    image = np.zeros((8, 8, 3), np.uint8)
    for call in (model.caption, model.encode_images, lambda image: model.classify(image, ["a", "b"])):
        with pytest.raises(UserError, match="translates texts, and reads no images; use translate"):
            call(image)
    with pytest.raises(UserError, match=r"text 2, 'alpha beta .*', has 11 tokens, its end included, and 8 are read"):
        model.translate(["alpha", " ".join(WORDS[:5] * 2)])
    with pytest.raises(UserError, match="text 2 is blank; leave it out"):
        model.translate(["alpha", " "])
    with pytest.raises(UserError, match="num_texts = 1000000000 is more than 4096"):
        model.translate("alpha", num_texts=10**9)
    with pytest.raises(UserError, match="samples = 1000000000 must be from 0 to 10,000"):
        model.translate("alpha", samples=10**9)
    with pytest.raises(UserError, match="no texts; give at least one"):
        model.translate([])
    assert "no text to translate" in refusal(capsys, "translate", " ", "--checkpoint", run)
    assert "--to huggingface has no translation models" in refusal(
        capsys, "export", "--checkpoint", run, "--to", "huggingface", "--output", str(tmp_path / "out")
    )
    labelled = tmp_path / "labelled"
    for folder in (labelled, labelled / "train"):
        write(folder, sentences(4), **{str(number): {"cls": number % 2} for number in range(4)})
    (labelled / "classnames.txt").write_text("odd\neven\n")
    for command in ("few-shot", "linear-probe"):
        line = [command, "--checkpoint", run, "--data", f"set={labelled}", "--split", ".", "--train-split", "train"]
        assert "need an image tower, and the model translates texts" in refusal(capsys, *line)
    assert main(["retrieval", "--checkpoint", run, "--data", f"set={labelled}", "--captions", "json/target"]) == 1
    assert "retrieval needs an image-text model" in capsys.readouterr().err
    assert "the model has no image tower: it translates texts" in refusal(
        capsys, "embed", "--tower", run, "--output", str(tmp_path / "embeddings")
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
        ({"text_tower": {"length": 9}}, "the encoder has length 9"),
        ({"text_tower": {"padding_token": 1}}, "text-tower.padding-token 1 is not the padding of the tokenizer, 0"),
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
    )
    with tiny.untrained(), pytest.raises(UserError, match=message):
        train(config)


@pytest.mark.parametrize("token", [1, 2])
def test_padding_that_stands_for_something_else_is_refused(trained, tmp_path, token):
    tower = dataclasses.replace(trained.task.text_tower, padding_token=token)
    config = dataclasses.replace(
        trained,
        run_dir=tmp_path / "run",
        task=dataclasses.replace(trained.task, text_tower=tower),
        tokenizer=dataclasses.replace(trained.tokenizer, padding_id=token),
    )
    with tiny.untrained(), pytest.raises(UserError, match=f"the padding of the tokenizer, {token}, is also its end"):
        train(config)


def test_stored_embeddings_have_no_place_beside_sources(trained):
    with pytest.raises(UserError, match="`source` is read in place of images"):
        dataclasses.replace(trained.data, embeddings="folder")
