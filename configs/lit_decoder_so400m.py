"""LiT-decoder on a locked SoViT-400m/14: captions and three kinds of questions at once, in full size.

Resolution, batch, epochs, images, optimizer, clipping, smoothing, learning rate, weight decay, schedule, vocabulary,
dropout and depth: SoViT Table 6 and Sec. 4.2. The paper prints neither the decoder's width, nor the prompts, nor the
shares of the data sets: these are ours. Images are augmented, so the tower computes every batch.
"""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Schedule

TEXT_LENGTH = 64


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``, ``--data.mixture``, ``--tokenizer.model`` and ``--pretrained.run``."""
    blocks = EncoderConfig(width=1152, depth=2, mlp_width=4304, num_heads=16, causal=True, compute_type="bfloat16")
    return ExperimentConfig(
        run_dir=Path("runs/lit_decoder_so400m"),
        task=CaptioningConfig(
            image_tower=ViTConfig(image_size=224, patch_size=14, encoder=encoder_size("So400m"), pooling="none"),
            decoder=DecoderConfig(vocabulary_size=32_000, length=TEXT_LENGTH, encoder=blocks, dropout=0.1),
            head=DeterministicConfig(),
            loss=SoftmaxCrossEntropy(label_smoothing=0.1),
        ),
        data=LoaderConfig(
            shards=("data/coco/train",),
            prompt="caption:",
            mixture=tuple(
                WeightedShards((f"data/{name}/train",), captions="json/questions", prompt=f"{name}: {{question}}")
                for name in ("vqa", "gqa", "ocr-vqa")
            ),
            image_size=224,
            batch_size=512,
            preprocessing=Preprocessing(fit="crop", crop_fraction=224 / 256),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
        ),
        tokenizer=SentencePieceConfig(model=Path("data/tokenizer.model"), length=TEXT_LENGTH),
        pretrained=PretrainedConfig(run=Path("runs/so400m")),
        calibration=None,
        length=Duration(50, "epochs"),
        optimizer=Optimizer(Adafactor(), weight_decay=1e-4, clip_norm=1.0),
        schedule=Schedule(learning_rate=3e-4, warmup=Duration(10, "percent")),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
