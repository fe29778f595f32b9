"""LiT on a locked SoViT-400m/14 with a HET-XL head, in full size.

Tower, resolution, batch, examples, optimizer, clipping, learning rate and schedule: SoViT Table 7. Head and factors:
HET-XL App. A.2 and N.2, which uses the softmax loss, but with 16 noise samples, a learning rate of their own for the
covariances (docs/noise.md) and the temperature that LiT starts with; the paper's own settings are those of
`lit_gigantic14_het_xl`. Images are not augmented, so `lit-het embed` can compute the tower's embeddings once
(``--data.embeddings``).
"""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Schedule

BATCH_SIZE = 32_768


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``, ``--tokenizer.model`` and ``--pretrained.run``."""
    return ExperimentConfig(
        run_dir=Path("runs/lit_so400m_het_xl"),
        task=ContrastiveConfig(
            image_tower=ViTConfig(image_size=224, patch_size=14, encoder=encoder_size("So400m"), pooling="attention"),
            text_tower=TextConfig(
                vocabulary_size=32_000,
                length=16,
                embedding_size=1152,
                encoder=encoder_size("So400m"),
                pooling="last",
            ),
            head=HetXLContrastiveConfig(temperature=LogTemperature(1 / 10, learning_rate_factor=1.0)),
        ),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",),
            image_size=224,
            batch_size=BATCH_SIZE,
            preprocessing=Preprocessing(filter="fast"),
            threads=16,
        ),
        tokenizer=SentencePieceConfig(model=Path("data/tokenizer.model"), length=16),
        pretrained=PretrainedConfig(run=Path("runs/so400m")),
        length=Duration(900_000_000, "examples"),
        optimizer=Optimizer(Adafactor(), weight_decay=1e-4, clip_norm=1.0),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(20, "percent")),
        # The optimizer state of 492 M parameters is split over the nearest devices.
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
