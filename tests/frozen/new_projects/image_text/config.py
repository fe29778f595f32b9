"""image_text: a text tower and a HET-XL head on a locked image tower, for 1,000 image-text pairs.

Written by lit-het new for 1 cpu, 20.2 GiB each. Train it with lit-het train --config image_text/config.py
"""

from pathlib import Path

from lit_het.data_pipelines.portions import Portion
from lit_het.data_pipelines.tokenizers import SentencePieceConfig
from lit_het.durations import Duration
from lit_het.runs.directory import load_config
from lit_het.schedules import Schedule

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import RetrievalConfig
from lit_het.heads.contrastive import HetXLContrastiveConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.training.loop import Cadence

PROJECT = Path(__file__).resolve().parent
TOWER = Path("/data/classifier")
SHARDS = "/data/pairs/train"


def get_config() -> ExperimentConfig:
    """Returns the run; every field is also a flag, such as --length "5 epochs"."""
    tower = load_config(TOWER)  # its images were preprocessed in the same way
    image_tower = tower.task.image_tower
    return ExperimentConfig(
        run_dir=PROJECT / "run",
        task=ContrastiveConfig(
            image_tower=image_tower,  # locked: the text tower and the head are trained
            text_tower=TextConfig(
                vocabulary_size=56,
                length=8,  # tokens of a caption
                embedding_size=image_tower.embedding_size,
                encoder=EncoderConfig(width=256, depth=2, mlp_width=1024, num_heads=4),
                pooling="last",
            ),
            head=HetXLContrastiveConfig(),  # DeterministicContrastiveConfig() learns no noise
            loss=SoftmaxLoss(),  # or SigmoidLoss(), with initial_bias=-10.0 in the head
        ),
        data=LoaderConfig(
            shards=(SHARDS,),
            image_size=image_tower.image_size,
            batch_size=32,  # fits into 20.2 GiB, see lit-het plan
            captions="txt",
            preprocessing=tower.data.preprocessing,
            threads=2,
        ),
        tokenizer=SentencePieceConfig(PROJECT / "tokenizer.model", length=8),
        pretrained=PretrainedConfig(run=TOWER),
        length=Duration(20, "epochs"),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(10, "percent")),
        mesh=MeshConfig(),
        cadence=Cadence(log_steps=31, save_steps=100),
        # Calibrated and evaluated on, but not trained on: 13 %, by a hash of their keys.
        calibration=Portion(87, by="key"),
        evaluations=(RetrievalConfig(ImageSet("held_out", SHARDS, SHARDS, Portion(87, by="key")), captions="txt"),),
    )
