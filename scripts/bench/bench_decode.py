"""Times greedy text of a decoder: with and without keys and values of earlier tokens, and beside transformers.

A GPT-2 of transformers with attention to a source has the decoder's own parameters; all variants must write the same
tokens. Variants run in turn; a ratio is taken round by round.

    python -m scripts.bench.bench_decode --batches 1 16 [--output results]
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

# PyTorch's threads otherwise wait by spinning: on a machine with other jobs that is several times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console

from lit_het import parameters
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.writing import WritingTask
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import Source
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.types import Params
from scripts.bench.tools import MIB, Program, Report, parser_of, ratio, seconds_in_turn, spread

try:
    import torch  # pyright: ignore[reportMissingImports]  # of the extra "parity"
except ImportError:
    torch = None

CACHED, WHOLE, THEIRS = "with the cache", "without the cache", "transformers"
# (numerator, denominator, what is asked of their ratio)
RATIOS = ((WHOLE, CACHED, ""), (THEIRS, CACHED, "at least 1.0 at batch 16"))


def main() -> None:
    """Prints the tables."""
    options = _options()
    report = Report(Console(width=150), "Text of a decoder")
    task = _task(options)
    params = jax.jit(task.initialize)(jax.random.key(0))
    # Embeddings of a trained model's size, so that tokens differ.
    params["decoder"]["tokens"]["embedding"] *= 2.0
    count = parameters.count({"decoder": params["decoder"], "head": params["head"]})
    report.note(
        f"{options.depth} blocks of width {options.width}, {options.vocabulary:,} tokens, {count / 1e6:.1f} M "
        f"parameters; {options.tokens} tokens of text on {options.source} tokens of an image, greedily, float32"
    )
    for batch in options.batches:
        _measure(batch, task, params, options, report)
    if options.output:
        report.write(options.output, "bench_decode", None)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON and Markdown")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--source", type=int, default=196, help="tokens of an image")
    parser.add_argument("--tokens", type=int, default=32, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _task(options: argparse.Namespace) -> WritingTask:
    heads = options.width // 64
    encoder = EncoderConfig(
        width=options.width, depth=options.depth, mlp_width=4 * options.width, num_heads=heads, unrolled=True
    )
    decoder = DecoderConfig(
        options.vocabulary, options.tokens, dataclasses.replace(encoder, causal=True), tied_output=True
    )
    # The image tower is not measured; its width is that of the source.
    tower = ViTConfig(32, 16, dataclasses.replace(encoder, depth=1), pooling="none")
    return CaptioningConfig(tower, decoder).build()


def _measure(batch: int, task: WritingTask, params: Params, options: argparse.Namespace, report: Report) -> None:
    source = jax.random.normal(jax.random.key(1), (batch, options.source, options.width))
    prompt = Prompt(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))
    how = GenerationConfig(num_tokens=options.tokens)

    def cached(params: Params, source: Float[Array, "b n width"]) -> Int[Array, "b n"]:
        # No token ends a text: all variants write as many.
        return generate(task, params, Source(source), prompt, how, end_token=-1).tokens[:, 0]

    programs = {
        CACHED: Program.of(cached, params, source),
        WHOLE: Program.of(lambda params, source: _whole(task, params, source, options.tokens), params, source),
    }
    calls: dict[str, Callable[[], Any]] = {name: program.call for name, program in programs.items()}
    if torch is not None:
        calls[THEIRS] = _transformers(task, params, np.asarray(source), options)
    tokens = {name: np.asarray(call()) for name, call in calls.items()}
    for name, found in tokens.items():
        np.testing.assert_array_equal(found, tokens[CACHED], err_msg=name)
    seconds = seconds_in_turn(calls, options.rounds, 120.0, lambda _: None)
    rows = []
    for name, measured in seconds.items():
        rate, memory = batch * options.tokens / np.median(measured), ""
        if name in programs:
            memory = f"{programs[name].peak / MIB:.0f}"
        rows.append((name, f"{1000 * np.median(measured):.0f}", f"{rate:.0f}", memory))
    report.table(f"batch {batch}", ("greedy text", "ms", "tokens/s", "MiB"), rows)
    lines = [(f"{one} / {other}", spread(ratio(seconds, one, other)), goal) for one, other, goal in RATIOS]
    report.table(f"Ratios of time, batch {batch}", ("ratio", "median (min-max)", "goal"), lines)
    report.note(_limits(batch, params, options, float(np.median(seconds[CACHED]))))
    report.data[f"batch {batch}"] = seconds


def _whole(task: WritingTask, params: Params, source: Float[Array, "b n width"], count: int) -> Int[Array, "b n"]:
    """Writes greedily, with all earlier tokens computed anew for each."""
    model = task.model(params)
    state = model.decoder.start(source)

    def write(step: Int[Array, ""], tokens: Int[Array, "b n"]) -> Int[Array, "b n"]:
        inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        features, _ = model.decoder(inputs, state)
        samples = model.head(features[:, step], None)
        logits = samples.logits(samples.prepare(samples.features), None, jnp.arange(1))[:, 0]
        return tokens.at[:, step].set(jnp.argmax(logits, axis=1).astype(jnp.int32))

    return jax.lax.fori_loop(0, count, write, jnp.zeros((len(source), count), jnp.int32))


def _limits(batch: int, params: Params, options: argparse.Namespace, seconds: float) -> str:
    """Returns the arithmetic, and the bytes of parameters that are read for each token, beside what was measured."""
    width, depth = options.width, options.depth
    # Projections of both attentions (the source's keys and values once), the MLP, and the logits.
    of_token = depth * (2 * 4 + 2 * 2 + 2 * 8) * width**2 + 2 * width * options.vocabulary
    of_source = depth * 2 * 2 * width**2 * options.source
    operations = batch * (options.tokens * of_token + of_source)
    kernels = 4 * parameters.count({"blocks": params["decoder"]["blocks"], "tokens": params["decoder"]["tokens"]})
    return (
        f"With the cache: {operations / 1e9:.1f} GFLOP of dense layers, {operations / seconds / 1e9:.0f} GFLOP/s; each "
        f"token reads {kernels / 1e6:.0f} MB of parameters, {options.tokens * kernels / seconds / 1e9:.1f} GB/s."
    )


def _transformers(
    task: WritingTask, params: Params, source: np.ndarray, options: argparse.Namespace
) -> Callable[[], Any]:
    """Returns GPT-2's greedy generation with the decoder's parameters."""
    assert torch is not None
    import transformers

    from lit_het.weights.huggingface.decoders import write_decoder

    decoder = task.config.decoder
    flat = {part: parameters.flatten(jax.tree.map(np.asarray, params[part])) for part in ("decoder", "head")}
    written = write_decoder(decoder, flat["decoder"], flat["head"], 1.0, decoder.encoder.width)
    written.config.update({"bos_token_id": 0, "pad_token_id": 0})
    model: Any = transformers.GPT2LMHeadModel(written.config).eval()
    state = {name: torch.as_tensor(array.copy()) for name, array in written.arrays.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    start, hidden = torch.zeros((len(source), 1), dtype=torch.long), torch.as_tensor(source.copy())
    torch.set_num_threads(os.cpu_count() or 1)
    # Given, as the start token counts as padding otherwise.
    mask = torch.ones_like(start)

    def call() -> np.ndarray:
        # Without gradients (`generate` is decorated so).
        how = {"max_new_tokens": options.tokens, "do_sample": False, "use_cache": True}
        found = model.generate(start, attention_mask=mask, encoder_hidden_states=hidden, **how)
        return found[:, 1:].numpy().astype(np.int32)

    return call


if __name__ == "__main__":
    main()
