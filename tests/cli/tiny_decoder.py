"""A decoder that was trained on coloured shapes and on questions about their colours."""

import dataclasses

from lit_het.configs import quickstart_decoder
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.data_config import WeightedShards
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.train import train
from tests import tiny

NAMES = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]
QUESTION = "which colour?"
STEPS = 150


def pixels(config, count):
    """Returns the first images."""
    image = next(Loader(config.data).epoch(count)).image
    assert image is not None
    return image


def short(config, **fields):
    """Returns a run of two steps of the decoder with a head without noise: tests share the step that is compiled."""
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, head=DeterministicConfig()),
        length=Duration(2),
        schedule=Schedule(1e-3, warmup=Duration(1)),
        cadence=Cadence(log_steps=1, save_steps=2, evaluate_steps=1),
        **fields,
    )


def train_decoder(folder):
    """Trains a decoder of captions and answers with a HET-XL head on the vocabulary; returns its configuration."""
    root = tiny.write_data(folder)
    config = tiny.shrink(quickstart_decoder.get_config(), root, root / "run")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=()))  # of the quickstart
    assert isinstance(config.task, CaptioningConfig)
    assert config.tokenizer is not None
    samples = []
    for number, image in enumerate(pixels(config, tiny.NUM_SAMPLES)):
        colour = NAMES[number % len(NAMES)].split()[0]
        questions = [{"id": number, "question": QUESTION, "answers": [colour]}]
        samples.append({"__key__": f"{number:04d}", "npy": image, "json": {"questions": questions}})
    samples = [{"__key__": one["__key__"], "jpg": tiny.encode_jpeg(one["npy"]), "json": one["json"]} for one in samples]
    write_shards(root / "questions", samples)
    vocabulary = tiny.train_sentencepiece([*NAMES, QUESTION, "a shape : answer"] * 5, vocabulary_size=60)
    (root / "tokenizer.model").write_bytes(vocabulary)
    upstream = tiny.classifier(config, root, root / "upstream")
    tiny.finish_untrained(upstream)  # colours and shapes can be read from the features of any tower
    questions = WeightedShards((str(root / "questions"),), captions="json/questions", prompt="answer: {question}")
    noise = HetXLConfig(CovarianceConfig(4), sampling=SamplingConfig(num_samples=4, num_eval_samples=4))
    decoder = dataclasses.replace(config.task.decoder, length=24, dropout=0.0)
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, head=noise, decoder=decoder),
        tokenizer=dataclasses.replace(config.tokenizer, length=24),
        data=dataclasses.replace(config.data, prompt="a shape:", mixture=(questions,), batch_size=8),
        pretrained=PretrainedConfig(root / "upstream"),
        length=Duration(STEPS),
        schedule=Schedule(1e-2, warmup=Duration(10)),
        cadence=Cadence(log_steps=50, save_steps=STEPS),
    )
    train(config)
    return config
