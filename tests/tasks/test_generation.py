"""Text that is written token by token equals what the probabilities of whole texts say."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.sharding import MeshConfig, batch_sharding, tree_shardings
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.given_texts import text_log_probabilities
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderConfig, Source
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

ENCODER = EncoderConfig(width=8, depth=2, mlp_width=12, num_heads=2)
DECODER = DecoderConfig(vocabulary_size=5, length=6, encoder=dataclasses.replace(ENCODER, causal=True))
CAPTIONING = CaptioningConfig(ViTConfig(8, 4, ENCODER, pooling="none"), DECODER)
NOISY = dataclasses.replace(
    CAPTIONING, head=HetXLConfig(CovarianceConfig(3), sampling=SamplingConfig(num_samples=4, num_eval_samples=4))
)
END = 1
RANDOM = np.random.default_rng(3)
SOURCE = RANDOM.normal(size=(8, 4, 8)).astype(np.float32)
PROMPT = Prompt(
    jnp.asarray(RANDOM.integers(2, 5, (8, 3), np.int32)), jnp.asarray(np.array([0, 3, 1, 2, 2, 3, 0, 1], np.int32))
)
NO_PROMPT = Prompt(jnp.asarray(np.zeros((8, 0), np.int32)), jnp.asarray(np.zeros(8, np.int32)))


@functools.cache
def trained(config=CAPTIONING):
    """Returns a task and parameters whose next tokens depend strongly on image and text."""
    task = config.build()
    random = np.random.default_rng(3)
    # Biases would make the same token the most probable everywhere.
    drawn = {
        path: np.zeros(x.shape) if path.endswith("bias") else random.normal(size=x.shape)
        for path, x in parameters.flatten(task.shapes).items()
    }
    return task, parameters.unflatten({path: np.float32(x) for path, x in drawn.items()})


@functools.cache
def compiled(config, how):
    task, _ = trained(config)

    def run(params, source, prompt, noise, keys):
        return generate(
            task, params, source, prompt, how, end_token=END, noise=None if noise is None else (noise, 4), keys=keys
        )

    return jax.jit(run)


def written(config=CAPTIONING, source=SOURCE, prompt=PROMPT, noise=None, key=None, **fields):
    how = GenerationConfig(**{"num_tokens": 3, **fields})
    keys = None if key is None else jax.random.split(key, len(source))
    texts = compiled(config, how)(trained(config)[1], Source(jnp.asarray(source)), prompt, noise, keys)
    return jax.tree.map(np.asarray, texts)


@functools.cache
def _log_p(config, num_samples):
    task, _ = trained(config)

    def run(params, source, text, target, key):
        return text_log_probabilities(task, params, source, text, target, key and (key[0], num_samples))

    return jax.jit(run)


def log_probabilities(texts, prompt=PROMPT, source=SOURCE, config=CAPTIONING, noise=None):
    """Returns the log-probabilities of tokens ``[b t n]`` up to their end, computed for whole texts at once."""
    b, count, n = texts.shape
    # Texts of zeros make up the number: one program serves all numbers up to it.
    t, length = max(count, 155), prompt.tokens.shape[1] + n
    texts = np.pad(texts, ((0, 0), (0, t - count), (0, 0)))
    text, target = np.zeros((b, t, length), np.int32), np.zeros((b, t, length), bool)
    for row, start in enumerate(np.asarray(prompt.length)):
        text[row, :, :start] = prompt.tokens[row, :start]
        for one, tokens in enumerate(texts[row]):
            text[row, one, start : start + n] = tokens
            ends = np.flatnonzero(tokens == END)
            target[row, one, start : start + (ends[0] + 1 if len(ends) else n)] = True
    rows = [jnp.asarray(x.reshape(b * t, length)) for x in (text, target)]
    found = np.asarray(
        _log_p(config, noise and noise[1])(trained(config)[1], Source(jnp.asarray(source)), *rows, noise and noise[:1])
    ).reshape(b, t, length)[:, :count]
    return np.stack([found[row, :, start : start + n] for row, start in enumerate(np.asarray(prompt.length))])


def all_texts(n=3):
    """Every text of at most n tokens: up to its end token, or without one; padded with zeros."""
    found = []
    for tokens in itertools.product(range(5), repeat=n):
        end = tokens.index(END) if END in tokens else n
        found.append((*tokens[: end + 1], *[0] * (n - end - 1)))
    return np.asarray(list(dict.fromkeys(found)))


@functools.cache
def probabilities_of_all_texts():
    return log_probabilities(np.broadcast_to(all_texts(), (8, *all_texts().shape))).sum(axis=2)


@pytest.mark.slow
def test_the_probabilities_of_all_texts_sum_to_one():
    np.testing.assert_allclose(np.exp(probabilities_of_all_texts()).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("prompt", [PROMPT, NO_PROMPT], ids=["prompts of several lengths", "no prompt"])
def test_greedy_text_is_the_most_probable_token_at_each_step(prompt):
    texts = written(prompt=prompt)
    assert texts.tokens.shape == (8, 1, 3)
    has_ended = np.zeros(8, bool)
    for step in range(3):
        candidates = np.repeat(texts.tokens, 5, axis=1)
        candidates[:, :, step:] = 0
        candidates[:, :, step] = np.arange(5)
        log_p = log_probabilities(candidates, prompt)[:, :, step]
        token = np.where(has_ended, 0, log_p.argmax(axis=1))
        np.testing.assert_array_equal(texts.tokens[:, 0, step], token)
        expected = np.where(has_ended, 0, log_p.max(axis=1))
        np.testing.assert_allclose(texts.log_p[:, 0, step], expected, rtol=0, atol=1e-4)
        has_ended |= token == END
    np.testing.assert_allclose(texts.score, texts.log_p.sum(axis=2), rtol=1e-6)
    assert (texts.tokens == END).any(), "some end before the most tokens"


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_beams_as_many_as_texts_find_the_best_of_all_texts(alpha):
    texts, log_p = all_texts(), probabilities_of_all_texts()
    length = np.where((texts == END).any(axis=1), (texts == END).argmax(axis=1) + 1, 3)
    score = log_p / ((5 + length) / 6) ** alpha
    found = written(num_texts=len(texts), length_penalty=alpha)
    order = np.argsort(-score, axis=1)
    np.testing.assert_allclose(found.score, np.take_along_axis(score, order, axis=1), atol=1e-3)
    np.testing.assert_array_equal(found.tokens[:, 0], texts[order[:, 0]])


@functools.cache
def totals_of_beginnings():
    """Returns the log-probabilities of all beginnings of texts, for each image by their tokens."""
    beginnings = [tokens for n in (1, 2, 3) for tokens in itertools.product(range(5), repeat=n)]
    padded = np.asarray([[*tokens, *[0] * (3 - len(tokens))] for tokens in beginnings])
    log_p = np.cumsum(log_probabilities(np.broadcast_to(padded, (8, *padded.shape))), axis=2)
    return [{tokens: of[len(tokens) - 1] for tokens, of in zip(beginnings, row, strict=True)} for row in log_p]


def beam_search(row, t, alpha, n=3):
    """Beam search of one image as a loop over lists (Wu et al. 2016, Sec. 7)."""
    alive, best, totals = [((), 0.0)], [], totals_of_beginnings()[row]
    for step in range(n):
        candidates = [(more, totals[more]) for tokens, _ in alive for more in ((*tokens, token) for token in range(5))]
        candidates.sort(key=lambda candidate: -candidate[1])
        candidates = candidates[: 2 * t]
        ended = [one for one in candidates if one[0][-1] == END or step + 1 == n]
        best += [(total / ((5 + len(tokens)) / 6) ** alpha, tokens) for tokens, total in ended]
        alive = [one for one in candidates if one not in ended][:t]
    return sorted(best, reverse=True)[:t]


def test_few_beams_are_those_of_a_search_over_lists():
    found = written(num_texts=2)
    for row in range(8):
        expected = beam_search(row, 2, 0.6)
        np.testing.assert_allclose(found.score[row], [score for score, _ in expected], atol=1e-4)
        for tokens, (_, one) in zip(found.tokens[row], expected, strict=True):
            assert tuple(tokens[: len(one)]) == one
            assert not tokens[len(one) :].any()


@pytest.mark.slow
def test_texts_are_sampled_as_often_as_they_are_probable():
    found = written(num_texts=2000, temperature=1.0, key=jax.random.key(0))
    texts, p = all_texts(), np.exp(probabilities_of_all_texts())
    for row in range(8):
        numbers = (found.tokens[row][:, None] == texts[None]).all(axis=2).mean(axis=0)
        # Five standard errors of a share of 2,000 draws.
        np.testing.assert_array_less(np.abs(numbers - p[row]), 5 * np.sqrt(p[row] * (1 - p[row]) / 2000) + 3e-3)
    np.testing.assert_allclose(found.log_p.sum(axis=2), log_probabilities(found.tokens).sum(axis=2), atol=1e-3)
    assert (np.diff(found.score, axis=1) <= 0).all(), "the best first"


def first_tokens(**fields):
    found = written(num_tokens=1, num_texts=2000, temperature=1.0, key=jax.random.key(1), **fields)
    return np.stack([np.bincount(row[:, 0], minlength=5) / 2000 for row in found.tokens])


@pytest.mark.slow
def test_top_k_and_top_p_leave_out_improbable_tokens():
    one = np.asarray([[[token] for token in range(5)]] * 8)
    p = np.exp(log_probabilities(one)[:, :, 0])
    order = np.argsort(-p, axis=1)
    for fields, count in (({"top_k": 2}, np.full(8, 2)), ({"top_p": 0.8}, None)):
        shares = first_tokens(**fields)
        for row in range(8):
            sums = np.cumsum(p[row][order[row]])
            kept = order[row][: count[row] if count is not None else int(np.searchsorted(sums, 0.8)) + 1]
            expected = np.zeros(5)
            expected[kept] = p[row][kept] / p[row][kept].sum()
            np.testing.assert_allclose(shares[row], expected, atol=0.06)
            assert not shares[row][np.setdiff1d(np.arange(5), kept)].any()


@pytest.mark.slow
def test_a_low_temperature_is_greedy_and_other_keys_draw_other_texts():
    cold = written(temperature=1e-3, key=jax.random.key(2))
    np.testing.assert_array_equal(cold.tokens, written().tokens)
    texts = [written(num_texts=5, temperature=1.0, key=jax.random.key(key)).tokens for key in (1, 1, 2)]
    np.testing.assert_array_equal(texts[0], texts[1])
    assert (texts[0] != texts[2]).any()


@pytest.mark.slow
def test_the_samples_of_an_image_do_not_depend_on_others():
    keys = jax.random.split(jax.random.key(2), 8)
    how = GenerationConfig(num_tokens=3, num_texts=5, temperature=1.0)
    params = trained()[1]
    expected = compiled(CAPTIONING, how)(params, Source(jnp.asarray(SOURCE)), PROMPT, None, keys).tokens
    some = jax.tree.map(lambda x: np.asarray(x)[2:5], PROMPT)
    found = compiled(CAPTIONING, how)(params, Source(jnp.asarray(SOURCE[2:5])), some, None, keys[2:5]).tokens
    np.testing.assert_array_equal(found, expected[2:5])


@pytest.mark.slow
def test_probabilities_of_tokens_are_averaged_over_noise():
    noise = jax.random.key(5)
    texts = written(NOISY, num_tokens=1, noise=noise)
    task, params = trained(NOISY)

    @jax.jit
    def probabilities(params):
        model = task.model(params)
        # The first token of every prompt, from the features after its last token.
        features, _ = model.decoder(jnp.zeros((8, 1), jnp.int32), model.decoder.start(jnp.asarray(SOURCE)))
        samples = model.head(features[:, 0], noise, 4)
        # The noise of position 0 of every text.
        keys = jnp.broadcast_to(jax.random.fold_in(noise, 0), (8,))
        return jax.nn.softmax(samples.logits(samples.prepare(samples.features), keys, jnp.arange(4)))

    p = np.asarray(probabilities(params)).mean(axis=1)
    for row in (0, 6):  # those without a prompt
        assert texts.log_p[row, 0, 0] == pytest.approx(np.log(p[row].max()), abs=1e-4)
    assert np.abs(texts.log_p - written(NOISY, num_tokens=1).log_p).max() > 1e-3


@pytest.mark.slow
def test_beams_that_are_written_have_the_probabilities_of_the_same_texts_given():
    noise = jax.random.key(5)
    texts = written(NOISY, noise=noise, num_texts=2)
    expected = log_probabilities(texts.tokens, config=NOISY, noise=(noise, 4))
    np.testing.assert_allclose(texts.log_p, expected, atol=1e-4)


def test_only_allowed_tokens_are_written():
    task, params = trained()
    allowed = jnp.asarray([False, True, True, True, False])
    run = jax.jit(
        lambda params, source: generate(
            task, params, source, PROMPT, GenerationConfig(3, 2), end_token=END, allowed=allowed
        )
    )
    tokens = np.asarray(run(params, Source(jnp.asarray(SOURCE))).tokens)
    ended = np.cumsum(tokens == END, axis=2) - (tokens == END) > 0
    assert np.isin(tokens[~ended], [1, 2, 3]).all()
    assert (written(num_texts=2).tokens == 4).any()


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"num_texts": 2}, {"num_texts": 2, "temperature": 1.0}], ids=["beams", "samples"])
def test_eight_devices_write_the_texts_of_one(fields):
    key = jax.random.key(4) if "temperature" in fields else None
    expected = written(key=key, **fields)
    mesh = MeshConfig().build()
    _, params = trained()
    keys = None if key is None else jax.random.split(key, len(SOURCE))
    source, prompt, keys = jax.device_put((Source(jnp.asarray(SOURCE)), PROMPT, keys), batch_sharding(mesh))
    how = GenerationConfig(**{"num_tokens": 3, **fields})
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, tree_shardings(params, mesh))
        found = compiled(CAPTIONING, how)(placed, source, prompt, None, keys)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.score, expected.score, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 4}, "a prompt of 3 tokens and 4 tokens of text need more than the decoder's 6 positions"),
        ({"temperature": 1.0}, "sampling needs random keys"),
        ({"top_k": 3}, "set a temperature above 0"),
        ({"top_p": 0.0, "temperature": 1.0}, r"top_p = 0.0 is not in \(0, 1\]"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e-40}, "temperature = 1e-40 is neither 0 nor at least 0.001"),
        ({"length_penalty": 1000.0}, r"length_penalty = 1000.0 is not in \[0, 8\]"),
        ({"num_texts": 0}, "num_texts = 0 must be at least 1"),
    ],
)
def test_what_cannot_be_written_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        written(**fields)
