"""Records CLIP, a dual encoder, SigLIP 2 and DINOv3 of transformers: ``python tests/golden/record_image_text.py``.

Needs the extra ``parity``. Weights are random. Each folder is as `transformers` saves it; ``io.npz`` holds inputs,
embeddings and scores, ``ids.json`` the ids that `CLIPTokenizer` gives hard texts.
"""

import importlib
import json
from pathlib import Path

import numpy as np
import tokenizers

from tests.golden.random_models import CLIP_DEVIATION, CLIP_MEAN, randomise
from tests.golden.record_siglip_tokenizer import TRAINING, save

GOLDEN = Path(__file__).parent
LENGTH, SIZE = 12, 16
SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
IMAGE = SIZES | {"image_size": SIZE, "patch_size": 8}
IMAGES = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
# Several ends, and padding by other tokens than the end: only the first end is pooled.
IDS = np.array([[50, 3, 7, 9, 51, 51, 51, 51], [50, 1, 51, 2, 51, 4, 0, 0], [50, 8, 7, 6, 5, 4, 3, 51]])
BERT_IDS = np.array([[2, 3, 7, 9, 1, 0, 0, 0], [2, 8, 1, 0, 0, 0, 0, 0], [2, 8, 7, 6, 5, 4, 3, 1]])
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def train_clip_tokenizer(transformers):
    """Returns a `CLIPTokenizer` with byte-pair encoding trained on a few captions."""
    end = {"unk_token": "<|endoftext|>", "end_of_word_suffix": "</w>"}
    # The tokenizer of a class without vocabulary has CLIP's steps.
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(**end))
    steps = json.loads(transformers.CLIPTokenizer().backend_tokenizer.to_str())
    steps["model"] = json.loads(trained.to_str())["model"]
    steps |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    trained = tokenizers.Tokenizer.from_str(json.dumps(steps))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    trained.train_from_iterator(TRAINING, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return transformers.CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=LENGTH)


def patched(torch, images, size):
    """Returns the inputs of SigLIP 2 for square images ``[b h w c]``: flat patches, their mask and their grid."""
    side = images.shape[1] // size
    rows = images.reshape(-1, side, size, side, size, 3).transpose(0, 1, 3, 2, 4, 5).reshape(len(images), side**2, -1)
    return {
        "pixel_values": torch.tensor(rows / 127.5 - 1, dtype=torch.float32),
        "pixel_attention_mask": torch.ones(rows.shape[:2]),
        "spatial_shapes": torch.tensor([[side, side]] * len(images)),
    }


def record_siglip2(torch, transformers):
    """Writes embeddings of images with fewer and more patches than the 3 x 3 of the positions."""
    vision = {name: size for name, size in IMAGE.items() if name != "image_size"} | {"num_patches": 9}
    config = transformers.Siglip2VisionConfig(**vision)
    model = randomise(torch, transformers.Siglip2VisionModel(config))
    model.save_pretrained(GOLDEN / "hf_siglip2")
    io = {}
    for size in (16, 24, 40):
        images = np.random.default_rng(size).integers(0, 256, (2, size, size, 3), np.uint8)
        with torch.no_grad():
            output = model(**patched(torch, images, 8)).pooler_output
        io |= {f"in/{size}": images, f"out/{size}": output.numpy()}
    np.savez(GOLDEN / "hf_siglip2/io.npz", **io)


def record_dino3(torch, transformers):
    """Writes the tokens of images of the size of the configuration and of another shape."""
    fields = {
        "hidden_size": 24,
        "image_size": 24,
        "num_register_tokens": 2,
        "use_gated_mlp": True,
        "hidden_act": "silu",
    }
    config = transformers.DINOv3ViTConfig(**SIZES | {"patch_size": 8} | fields)
    model = randomise(torch, transformers.DINOv3ViTModel(config))
    model.save_pretrained(GOLDEN / "hf_dinov3")
    io = {}
    for name, shape in (("own", (24, 24)), ("wide", (16, 40))):
        images = np.random.default_rng(0).integers(0, 256, (2, *shape, 3), np.uint8)
        pixels = np.moveaxis((images / 255 - IMAGENET_MEAN) / IMAGENET_DEVIATION, -1, 1)
        with torch.no_grad():
            output = model(torch.tensor(pixels, dtype=torch.float32)).last_hidden_state
        io |= {f"in/{name}": images, f"out/{name}": output.numpy()}
    np.savez(GOLDEN / "hf_dinov3/io.npz", **io)


def main() -> None:
    """Writes the folders."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")  # of an extra
    torch.manual_seed(0)
    record_siglip2(torch, transformers)
    record_dino3(torch, transformers)
    text = SIZES | {"vocab_size": 52, "max_position_embeddings": 8}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text | {"bos_token_id": 50, "eos_token_id": 51}, vision_config=IMAGE, projection_dim=8
        )
    )
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**IMAGE), transformers.BertConfig(**text), projection_dim=8
    )
    dual = transformers.VisionTextDualEncoderModel(config)
    half = (0.5, 0.5, 0.5)
    for name, model, ids, mean, deviation in (
        ("hf_clip", clip, IDS, CLIP_MEAN, CLIP_DEVIATION),
        ("hf_dual_encoder", dual, BERT_IDS, half, half),
    ):
        folder = GOLDEN / name
        randomise(torch, model).save_pretrained(folder)
        pixels = np.moveaxis((IMAGES / 255 - mean) / deviation, -1, 1)
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor(ids),
                pixel_values=torch.tensor(pixels, dtype=torch.float32),
                attention_mask=torch.tensor(ids != 0) if model is dual else None,
            )
        names = ("image_embeds", "text_embeds", "logits_per_image")
        outputs = {f"out/{key}": getattr(output, key).numpy() for key in names}
        np.savez(folder / "io.npz", **{"in/images": IMAGES, "in/input_ids": ids.astype(np.int32)}, **outputs)
    save(train_clip_tokenizer(transformers), GOLDEN / "hf_clip_tokenizer")


if __name__ == "__main__":
    main()
