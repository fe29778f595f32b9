"""The original encoder-decoder Transformer in its base size, from English to German (Vaswani et al. 2017).

Layers, widths, heads, dropout, label smoothing, shared vocabulary and embeddings: Table 3 (base), Sec. 3.4, 5.1 and
5.4. Optimizer, schedule, steps, beams and length penalty: Sec. 5.2, 5.3 and 6.1. The paper fills each batch with pairs
of similar length, to about 25,000 tokens of each side. Batches here have a fixed shape: 800 pairs of at most 128
tokens, padding included. A pair of WMT 2014 has about 30 tokens, so that a batch has about as many. A source of more
than 128 tokens is a broken sample, of which a share is allowed; longer translations are cut.
"""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.eval.decoder_suite import WriteCaptionsConfig
from lit_het.eval.sets import ImageSet
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.translation import TranslationConfig
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import ReverseSquareRoot, Schedule

LENGTH = 128
VOCABULARY_SIZE = 37_000
WARMUP = Duration(4_000)


def blocks(*, causal: bool) -> EncoderConfig:
    """Returns the blocks of the encoder or of the decoder."""
    return EncoderConfig(
        width=512,
        depth=6,
        mlp_width=2048,
        num_heads=8,
        activation="relu",
        norm_placement="after",
        causal=causal,
        compute_type="bfloat16",
    )


def get_config(data: str = "data/wmt14") -> ExperimentConfig:
    """Returns the run; its folder ``data`` holds ``train``, ``newstest2013`` and ``tokenizer.model``."""
    encoder = TextConfig(
        VOCABULARY_SIZE,
        LENGTH,
        encoder=blocks(causal=False),
        pooling="none",
        positions="sinusoidal",
        padding_token=0,
        scaled_embedding=True,
        dropout=0.1,
    )
    decoder = DecoderConfig(
        VOCABULARY_SIZE,
        LENGTH,
        blocks(causal=True),
        positions="sinusoidal",
        scaled_embedding=True,
        tied_output=True,
        dropout=0.1,
    )
    validation = ImageSet("newstest2013", f"{data}/newstest2013", split=".", labelled=False)
    return ExperimentConfig(
        run_dir=Path("runs/translation_base"),
        task=TranslationConfig(
            encoder,
            decoder,
            head=DeterministicConfig(),
            loss=SoftmaxCrossEntropy(label_smoothing=0.1),
            shared_embedding=True,
        ),
        data=LoaderConfig(
            shards=(f"{data}/train",),
            batch_size=800,
            captions="json/de",
            caption_unit="text",
            prompt="",
            source="json/en",
            threads=4,
            max_bad_fraction=0.02,
        ),
        # Trained on both languages, as in the paper.
        tokenizer=SentencePieceConfig(model=Path(data, "tokenizer.model"), length=LENGTH, lowercase=False),
        calibration=None,
        length=Duration(100_000),
        optimizer=Optimizer(AdamW(second_decay=0.98, epsilon=1e-9), weight_decay=0.0, clip_norm=None),
        # Sec. 5.3 in another form: the peak is reached after the warm-up, and then falls as 1 / sqrt(step).
        schedule=Schedule((512 * 4_000) ** -0.5, WARMUP, decay=ReverseSquareRoot(timescale=WARMUP)),
        mesh=MeshConfig(fsdp=1),
        cadence=Cadence(log_steps=100, save_steps=1_500, keep=5, evaluate_steps=10_000),
        evaluations=(
            WriteCaptionsConfig(
                validation,
                captions="json/de",
                generation=GenerationConfig(num_tokens=LENGTH, num_texts=4, length_penalty=0.6),
            ),
        ),
    )
