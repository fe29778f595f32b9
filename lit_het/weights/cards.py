"""Model cards: ``README.md`` of an exported model, with the fields that the Hugging Face Hub reads."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.images.transforms import Transparency
from lit_het.data_pipelines.texts.captions_config import QUESTION
from lit_het.eval.evaluation import read_records
from lit_het.eval.report.tables import in_markdown, markdown_table
from lit_het.models.opening import Run

_TEXT = """\
# {name}

{what}

## Data

{data}

## Figures

{figures}

## Calibration

{calibration}

## Use

{use}
"""

TRANSPARENT = "transparent images: transformers drops transparency; compose them on white, as README.md shows"
"""What differs in images of a model that leaves for transformers."""

_OPENED: dict[Transparency, str] = {
    "white": """\
# On white, as in training: transformers would show what transparency hides.
image = Image.open("photo.jpg").convert("RGBA")
image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")""",
    "dropped": 'image = Image.open("photo.jpg").convert("RGB")',
}
_DECODER = """\
```python
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel

model = VisionEncoderDecoderModel.from_pretrained({name})
processor, tokenizer = AutoImageProcessor.from_pretrained({name}), AutoTokenizer.from_pretrained({name})
{opened}
pixels = processor(image, return_tensors="pt").pixel_values
{prompt}
```

Texts were trained behind these prompts: {prompts}. Those of a batch must have equally many tokens."""
_PROMPTED = """\
prompt = tokenizer({prompt!r}, add_special_tokens=False, return_tensors="pt").input_ids
[tokens] = model.generate(pixels, decoder_input_ids=prompt)
print(tokenizer.decode(tokens[prompt.shape[1] + 1 :], skip_special_tokens=True))"""
_UNPROMPTED = """\
[tokens] = model.generate(pixels)
print(tokenizer.decode(tokens, skip_special_tokens=True))"""
WITHOUT_NOISE = "the noise of the head is left out: texts are those of lit-het caption --samples 0"
"""What differs in a decoder with a HET-XL head that leaves for a library without noise."""


def write_card(run: Run, name: str, *, licence: str | None, library: str) -> str:
    """Returns the model card of a run.

    Args:
        run: the run.
        name: title of the card.
        licence: an identifier such as ``apache-2.0``; None leaves the field out, and the card says so.
        library: that opens the model: ``lit-het``, ``transformers`` or ``onnx``.
    """
    from huggingface_hub import ModelCard, ModelCardData

    tag = run.config.task.pipeline_tag
    fields = ModelCardData(license=licence, library_name=library, pipeline_tag=tag, tags=["lit-het", "jax"])
    text = _TEXT.format(
        name=in_markdown(name),
        what=_what(run),
        data=_data(run.config),
        figures=_figures(run),
        calibration=_calibration(run),
        use=_use(name, library, run.config),
    )
    if licence is None:
        text += "\nNo licence was given.\n"
    return str(ModelCard(f"---\n{fields.to_yaml()}\n---\n\n{text}"))


def _what(run: Run) -> str:
    task = run.config.task
    head, loss = type(task.head).__name__.removesuffix("Config"), type(task.loss).__name__
    towers = [type(tower).__name__.removesuffix("Config") for tower in task.towers.values()]
    alone = "" if run.member is None else f", member {run.member} of several text towers of one run"
    return f"{task.summary}{alone}, trained with lit-het: {' and '.join(towers)}, head {head}, loss {loss}."


def _data(config: ExperimentConfig) -> str:
    # Names only: paths tell about the machine that trained the model.
    shards = (
        ", ".join(in_markdown(Path(shard).name) for shard in config.data.shards)
        or "Unknown: the weights were imported."
    )
    length = f", {config.length}" if config.length.amount else ""
    if config.data.source is not None:
        texts = map(in_markdown, (config.data.source, config.data.captions))
        return f"{shards}\n\nTexts {' and '.join(texts)}{length}."
    return f"{shards}\n\nImages of {config.data.image_size} x {config.data.image_size} pixels{length}."


def _figures(run: Run) -> str:
    if run.member is not None:
        return "None was measured of this member alone."
    rows = [
        (
            *map(in_markdown, (record.kind.replace("_", "-"), record.name, name)),
            f"{value:.4g}{_error(record.errors.get(name))}",
        )
        for record in read_records(run.run_dir)
        if record.step == run.step
        for name, value in sorted(record.figures.items())
    ]
    titles = ("evaluation", "set", "figure", "value")
    return markdown_table(titles, rows).rstrip() if rows else "None was measured."


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2g}"


def _calibration(run: Run) -> str:
    if run.calibration is None:
        return "Not calibrated."
    names = tuple(Path(path).name for path in run.calibration.data)
    return in_markdown(str(dataclasses.replace(run.calibration, data=names)))


def _use(name: str, library: str, config: ExperimentConfig) -> str:
    tag, opened = config.task.pipeline_tag, _OPENED[config.data.preprocessing.transparency]
    if library == "transformers":
        if config.task.writes_text:
            return _use_of_decoder(name, opened, config.data.prompts, has_noise=config.task.head.has_noise)
        labels = ', candidate_labels=["a cat", "a dog"], hypothesis_template="{}"' if tag.startswith("zero") else ""
        lines = ("from PIL import Image", "from transformers import pipeline", "")
        made = f'classify = pipeline("{tag}", model={_quoted(name)})'
        return "\n".join(["```python", *lines, made, opened, f"classify(image{labels})", "```"])
    if library == "onnx":
        return "```bash\npython classify.py IMAGE --labels LABELS\n```"
    address = f"hf://{name}" if "/" in name else name
    return f"```python\nimport lit_het\n\nmodel = lit_het.load({_quoted(address)})\n```"


def _quoted(name: str) -> str:
    """Returns a name as a text of Python, on one line."""
    return json.dumps(name, ensure_ascii=False)


def _use_of_decoder(name: str, opened: str, prompts: Sequence[str], *, has_noise: bool) -> str:
    first = prompts[0].replace(QUESTION, "how many cats?")
    text = _DECODER.format(
        name=_quoted(name),
        opened=opened,
        prompt=_PROMPTED.format(prompt=first) if first else _UNPROMPTED,
        prompts=", ".join(f"`{prompt}`" if prompt else "none" for prompt in dict.fromkeys(prompts)),
    )
    return f"{text}\n\n{WITHOUT_NOISE[0].upper()}{WITHOUT_NOISE[1:]}." if has_noise else text
