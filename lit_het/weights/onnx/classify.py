"""Classifies images as ``lit-het classify`` does: ``python classify.py IMAGE ... --labels "a cat,a dog"``.

It needs numpy, onnxruntime, pillow, and sentencepiece or tokenizers. ``lit-het export --to onnx`` writes this file as
it is; everything that differs between models is in ``model.json``.
"""

import argparse
import hashlib
import io
import json
import re
import string
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

FOLDER = Path(__file__).parent


def run(name: str, values: np.ndarray) -> dict[str, Any]:
    """Returns the outputs of an ONNX file by name."""
    session = onnxruntime.InferenceSession(FOLDER / f"{name}.onnx")
    found = session.run(None, {session.get_inputs()[0].name: values})
    return {output.name: value for output, value in zip(session.get_outputs(), found, strict=True)}


def read(path, size, shorter_side, shrink, enlarge, transparency="white"):
    """Returns pixels ``[size size 3]``: upright; the whole image, or a central square."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I;16"):  # Pillow would cut off bright values
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGBA")
    if transparency == "white":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    sides = np.array(image.size)
    scaled = shorter_side * sides // sides.min() if shorter_side else np.array([size, size])
    corner = np.round((scaled - size) / 2)
    start, stop = corner * sides / scaled, (corner + size) * sides / scaled
    filter = shrink if min(stop - start) > size else enlarge
    if filter != "area":
        return np.asarray(image.resize((size, size), Image.Resampling[filter.upper()], (*start, *stop)))
    # The mean over an area of the image, to which every pixel belongs with a weight from 0 to 1 on each axis.
    ends = np.linspace(start, stop, size + 1).T[..., None]
    columns, rows = (
        np.clip(np.minimum(own[1:], pixel + 1) - np.maximum(own[:-1], pixel), 0, 1)
        for own, pixel in zip(ends, map(np.arange, sides), strict=True)
    )
    mean = np.einsum("jw,iwc->ijc", columns, np.tensordot(rows, np.asarray(image), 1)) * size**2 / np.prod(stop - start)
    # OpenCV rounds halves up where four pixels become one, and to even numbers elsewhere.
    return (np.floor(mean + 0.5) if all(stop - start == 2 * size) else np.rint(mean)).astype(np.uint8)


def tokenize(texts, file, length, padding_id, lowercase=False, remove_punctuation=False, split_underscores=False):
    """Returns token ids ``[texts length]``."""
    if file == "tokenizer.json":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(FOLDER / file))
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=padding_id)
        return np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)], np.int32)
    from sentencepiece import SentencePieceProcessor

    tokenizer = SentencePieceProcessor(model_file=str(FOLDER / file))
    texts = [text.lower() if lowercase else text for text in texts]
    texts = [text.replace("_", " ") if split_underscores else text for text in texts]
    if remove_punctuation:
        texts = [" ".join(text.translate(str.maketrans("", "", string.punctuation)).split()) for text in texts]
    ids = [[*tokenizer.encode(text)[: length - 1], tokenizer.eos_id()] for text in texts]
    return np.array([row + [padding_id] * (length - len(row)) for row in ids], np.int32)


def read_labels(labels):
    """Returns the lines of a file, or what stands between commas, without what is empty, as lit-het classify does."""
    is_file = Path(labels).is_file()
    parts = Path(labels).read_text("utf-8-sig").split("\n") if is_file else labels.split(",")
    return [part.strip() for part in parts if part.strip()]


def is_number(text):
    """Returns whether a text or value is a number."""
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def of_members(embeddings, count):
    """Returns the unit embeddings of each member, ``[members rows size]``, which are stored side by side."""
    return np.stack(np.split(embeddings, count, axis=1)) * count**0.5


def mean_prediction(logits):
    """Returns the log of the mean probability over the members and samples along the first axis."""
    highest = logits.max(-1, keepdims=True)
    log_p = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    highest = log_p.max(0)
    return np.log(np.exp(log_p - highest).mean(0)) + highest


def softmax(logits):
    """Returns probabilities over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def knows(name, rule, keys):
    """Returns whether training captions had a name, as ``lit_het.data_pipelines.texts.familiarity`` finds it.

    ``keys`` are those of ``familiarity.npz``, which are in order.
    """
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", name).casefold())
    words = words[1:] if words[:1] in (["a"], ["an"], ["the"]) and len(words) > 1 else words
    if not words:
        return False
    digests = (hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in words)
    hashes = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
    multiplier, order = np.uint64(0x9E3779B97F4A7C15), 0 if rule == "caption" else min(len(words), 4)
    if rule == "caption":
        grams = np.sum(hashes * (2 * np.arange(len(words)) + 1).astype(np.uint64) ** np.uint64(3), keepdims=True)
    else:
        grams = np.zeros_like(hashes)
        for count in range(1, order + 1):
            grams = grams[: len(words) - count + 1] * multiplier + hashes[count - 1 :]
    mixed = (grams ^ np.uint64(order)) * multiplier
    mixed = (mixed ^ (mixed >> np.uint64(29))) * multiplier
    found = (mixed >> np.uint64(32)).astype(np.uint32)
    return bool((keys[np.minimum(np.searchsorted(keys, found), len(keys) - 1)] == found).all())


def calibrated(logits, fitted, kind, seen, prior):
    """Returns probabilities with the fitted temperatures of "noiseless" or "monte_carlo" predictions."""
    names = fitted.get(f"{kind}_names")
    if names is None or seen.all() or (prior == "seen" and seen.any()):
        return softmax(logits / fitted[kind])
    if not seen.any() or prior == "new":
        return softmax(logits / names["alone"])
    share = 0.5 if prior == "balanced" else float(prior)
    # Names of a kind are equally frequent a priori; there were other numbers of them where the offset was fitted.
    odds = np.log((1 - share) / share) + np.log((~seen).sum() / seen.sum() / names["new_per_seen"])
    return softmax(logits / names["temperature"] + (names["offset"] + odds) * seen)


def entropy(probabilities):
    """Returns the entropy over the last axis, in nats."""
    return -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(-1)


def main():
    """Prints the noise norm of each image, and for each label its probability, without noise and with it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where its encoding lacks a character of a label
    parser = argparse.ArgumentParser(description="Classifies images as lit-het classify does.")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--labels", help="by commas, or a file; of a classifier its classes, in order, if not stored")
    parser.add_argument("--samples", type=int, default=0, help="noise samples; 0 for none")
    parser.add_argument("--prior", help="seen, new, balanced, or the share of right answers that are new names")
    options, model = parser.parse_args(), json.loads((FOLDER / "model.json").read_text())
    if options.labels is None:
        labels = model.get("classes") or parser.error("--labels is required: the names of the classes are not stored")
    else:
        labels = read_labels(options.labels)
    if options.samples and not (FOLDER / "covariance.onnx").exists():
        parser.error("--samples: this folder holds no covariance of the noise")
    fitted = model["calibration"]
    if options.prior and "rule" not in fitted:
        parser.error("--prior: the model is not calibrated by names")
    prior = options.prior or fitted.get("prior", "seen")
    if prior not in ("seen", "new", "balanced") and not (is_number(prior) and 0 < float(prior) < 1):
        parser.error(f"--prior {prior}: give seen, new, balanced, or a share of new names between 0 and 1")
    keys = np.load(FOLDER / "familiarity.npz")["keys"] if "rule" in fitted else None
    seen = np.array([keys is None or knows(label, fitted["rule"], keys) for label in labels])
    if not seen.all():
        print(f"{(~seen).sum():,} of {len(seen):,} names were not in the training captions")
    temperature = np.reshape(model.get("temperature", 1.0), (-1, 1, 1))  # of each member
    found = run("image", np.stack([read(path, **model["preprocessing"]) for path in options.images]))
    if "tokenizer" in model:
        found["classes"] = run("text", tokenize(labels, **model["tokenizer"]))["embedding"]
        found["classes"] = of_members(found["classes"], len(temperature))
        found["images"] = of_members(found["embedding"], len(temperature))
        found["logits"] = found["images"] @ found["classes"].swapaxes(1, 2) / temperature
    members = found["logits"].reshape(-1, *found["logits"].shape[-2:])
    if len(labels) != (count := members.shape[2]):
        parser.error(f"--labels names {len(labels)} classes, and the classifier has {count}")
    columns = {"probability": calibrated(mean_prediction(members), fitted, "noiseless", seen, prior)}
    if "bias" in model:
        columns["fits"] = (1 / (1 + np.exp(-members - np.array(model["bias"]).reshape(-1, 1, 1)))).mean(0)
    if (FOLDER / "covariance.onnx").exists():
        found |= run("covariance", found["embedding"])
    probabilities = softmax(members)
    if options.samples and "factors" in found:
        random, sampled = np.random.default_rng(0), []
        factors = np.split(found["factors"], len(temperature), axis=1)
        for image, noise, classes, tau in zip(found["images"], factors, found["classes"], temperature, strict=True):
            normals = random.standard_normal((len(noise), options.samples, noise.shape[1]))
            queries = image[:, None] + normals @ noise
            if model["normalize_after_noise"]:
                queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
            sampled.append((queries @ classes.T / tau).swapaxes(0, 1))
        mean = mean_prediction(np.concatenate(sampled))
        columns["with noise"] = calibrated(mean, fitted, "monte_carlo", seen, prior)
        probabilities = softmax(np.stack(sampled)).mean(axis=1)
    information = entropy(probabilities.mean(0)) - entropy(probabilities).mean(0)
    for row, path in enumerate(options.images):
        norm = f"{found['noise_norm'][row]:.6f}" if "noise_norm" in found else "0.000000"
        print(f"{path}: noise norm {'left out' if model.get('noise_is_left_out') else norm}", end="")
        print(f"  mutual information of members {information[row]:.6f}" if len(members) > 1 else "")
        for label in np.argsort(-columns["probability"][row]):
            print(*(f"{name} {values[row, label]:.6f}" for name, values in columns.items()), labels[label], sep="  ")


if __name__ == "__main__":
    main()
