"""Fine-tuning both towers of SigLIP B/16, SigLIP 2 B/16 or CLIP B/16 on one's own pairs, in full size.

    lit-het import --from hf://google/siglip-base-patch16-224 --to runs/siglip_b16
    lit-het train --config configs/fine_tune_pair.py:model=siglip_b16,adapt=lora --data.shards '/data/{000..099}.tar'

Batch, decays, warm-up and the rate of whole towers are those of FLYP (Goyal et al. 2023, App. D), which trains CLIP so;
the layer decay is SoViT Table 8's, and the rates of `lora` and `last_4` are larger, as less is trained. No paper gives
those of SigLIP. ``lit-het new --adapt`` writes a run of any model with the same rank, rates and decays; batch, length
and warm-up are those of one's own data there, and there is no average, which such short runs would leave at the start.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import (
    HuggingFaceTokenizerConfig,
    SentencePieceConfig,
    TokenizerConfig,
)
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

Model = Literal["siglip_b16", "siglip2_b16", "clip_b16"]
Adapt = Literal["full", "lora", "last_4"]

# Also those of `lit_het.apps.new.adapted`: the learning rates of whole towers, low-rank changes and last blocks.
RATES = {"full": 1e-5, "lora": 1e-4, "last": 3e-5}
RANK, LAYER_DECAY = 8, 0.85
TUNINGS = {"full": None, "lora": Tuning(lora=LoRA(RANK)), "last_4": Tuning(last_blocks=4)}


def get_config(model: Model = "siglip_b16", adapt: Adapt = "full") -> ExperimentConfig:
    """Returns the run; set ``--data.shards``. The model is the run that ``lit-het import`` makes."""
    start, tuning, rate = Path(f"runs/{model}"), TUNINGS[adapt], RATES[adapt.partition("_")[0]]
    task, tokenizer, preprocessing = (
        _clip(start) if model == "clip_b16" else _siglip(start, second=model != "siglip_b16")
    )
    towers: dict[str, Any] = {name: dataclasses.replace(tower, tuning=tuning) for name, tower in _towers(task).items()}
    return ExperimentConfig(
        run_dir=Path(f"runs/{model}_{adapt}"),
        task=dataclasses.replace(task, **towers),
        data=LoaderConfig(
            shards=("data/pairs/{00000..00331}.tar",),
            image_size=224,
            batch_size=512,
            preprocessing=preprocessing,
            threads=16,
        ),
        tokenizer=tokenizer,
        pretrained=PretrainedConfig(start, ".*"),  # head, temperature and bias, too
        length=Duration(10, "epochs"),
        optimizer=Optimizer(
            AdamW(second_decay=0.98), weight_decay=0.1 * rate, layer_decay=LAYER_DECAY if adapt == "full" else 1.0
        ),
        average_decay=0.999 if adapt == "full" else None,
        schedule=Schedule(learning_rate=rate, warmup=Duration(500)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )


def _towers(task: ContrastiveConfig) -> dict[str, Any]:
    return {"image_tower": task.image_tower, "text_tower": task.text_tower}


def _siglip(start: Path, *, second: bool) -> tuple[ContrastiveConfig, TokenizerConfig, Preprocessing]:
    encoder, length = encoder_size("B"), 64
    task = ContrastiveConfig(
        ViTConfig(224, 16, encoder, pooling="attention"),
        TextConfig(256_000 if second else 32_000, length, encoder.width, encoder, pooling="last"),
        DeterministicContrastiveConfig(LogTemperature(learning_rate_factor=1.0), initial_bias=0.0),
        SigmoidLoss(),
        locked=(),
    )
    model = start / "tokenizer.model"
    if second:
        return task, HuggingFaceTokenizerConfig(model, length), Preprocessing(filter="bilinear", transparency="dropped")
    return (
        task,
        SentencePieceConfig(model, length, padding_id=1, remove_punctuation=True),
        Preprocessing(filter="bicubic", transparency="dropped"),
    )


def _clip(start: Path) -> tuple[ContrastiveConfig, TokenizerConfig, Preprocessing]:
    encoder = dataclasses.replace(encoder_size("B"), activation="quick_gelu", norm_epsilon=1e-5)
    of_text = dataclasses.replace(encoder, width=512, mlp_width=2048, num_heads=8, causal=True)
    task = ContrastiveConfig(
        ViTConfig(224, 16, encoder, pooling="class_token", input_norm=True, projection_size=512),
        TextConfig(49_408, 77, 512, of_text, pooling="end_token"),
        DeterministicContrastiveConfig(LogTemperature(learning_rate_factor=1.0)),
        SoftmaxLoss(),
        locked=(),
    )
    tokenizer = HuggingFaceTokenizerConfig(start / "tokenizer.model", 77)
    return task, tokenizer, Preprocessing(fit="crop", filter="bicubic", transparency="dropped")
