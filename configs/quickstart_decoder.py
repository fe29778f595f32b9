"""A decoder that names characters and answers questions about them, on the locked tower of the quickstart.

It is that of SoViT App. C, in small.
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_lit_deterministic import VOCABULARY_SIZE
from lit_het.configs.quickstart_upstream import IMAGE_TOWER, ROOT
from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.texts.captions_config import QUESTION
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

LENGTH = 16  # of the longest name, or of a question with its answer


def get_config(root: Path = ROOT) -> ExperimentConfig:
    """Returns the run; ``root`` contains the data and the upstream run of ``lit-het quickstart``."""
    train = (str(root / "data" / "train"),)
    blocks = EncoderConfig(width=128, depth=2, mlp_width=512, num_heads=4, causal=True, unrolled=True)
    return ExperimentConfig(
        run_dir=root / "decoder",
        task=CaptioningConfig(
            image_tower=dataclasses.replace(IMAGE_TOWER, pooling="none"),
            decoder=DecoderConfig(VOCABULARY_SIZE, LENGTH, blocks, tied_output=True, dropout=0.1),
            head=DeterministicConfig(),
            loss=SoftmaxCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=train,
            # Names follow nothing, and answers their question.
            prompt="",
            mixture=(WeightedShards(train, 1.0, captions="json/questions", prompt=QUESTION),),
            image_size=32,
            batch_size=128,
            threads=1,
        ),
        tokenizer=SentencePieceConfig(model=root / "data" / "tokenizer.model", length=LENGTH),
        pretrained=PretrainedConfig(run=root / "upstream"),
        calibration=None,
        length=Duration(1500),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=2e-6),
        schedule=Schedule(learning_rate=2e-3, warmup=Duration(50)),
        cadence=Cadence(log_steps=25, save_steps=500),
    )
