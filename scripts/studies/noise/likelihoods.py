"""Compares the likelihoods of a HET-XL classifier on scikit-learn's digits with wrong labels (HET-XL Sec. 7).

    python -m scripts.studies.noise.likelihoods --seeds 5

Each head is trained by one likelihood, and predicts by 1,000 samples, whatever it was trained by, and without noise.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.eval.metrics.significance import estimate
from lit_het.heads import CovarianceConfig, DeterministicConfig, HetXLConfig, SamplingConfig, learning_rate_factors
from lit_het.losses import SoftmaxCrossEntropy, mean_log_probabilities
from scripts.studies.noise.digits import Digits, digits

STEPS, BATCH, LEARNING_RATE = 500, 256, 3e-3
COVARIANCE = CovarianceConfig(4, "efficient", initial_noise_norm=1.0)
VARIANTS: dict[str, tuple[Any, SoftmaxCrossEntropy]] = {
    "deterministic": (DeterministicConfig(), SoftmaxCrossEntropy()),
    **{
        f"{count} samples": (HetXLConfig(COVARIANCE, sampling=SamplingConfig(count)), SoftmaxCrossEntropy())
        for count in (1, 16)
    },
    **{
        name: (HetXLConfig(COVARIANCE, sampling=SamplingConfig(0)), SoftmaxCrossEntropy(likelihood=name))
        for name in ("delta", "mean_field", "pairwise_probit", "unscented", "tilted")
    },
}


def measured(config: Any, loss: SoftmaxCrossEntropy) -> Callable[[Digits, int], tuple[float, ...]]:
    """Returns a function of digits and a seed to what the inner function returns of a head that is trained on them."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(64, 10, nnx.Rngs(0))))
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    @jax.jit
    def run(params: Any, features: Float[Array, "n d"], labels: Int[Array, " n"], key: Array) -> Any:
        factors = learning_rate_factors(nnx.merge(graph, params))

        def step(carry: Any, key: Array) -> tuple[Any, None]:
            params, state = carry
            rows = jax.random.randint(key, (BATCH,), 0, len(features))

            def value(params: Any) -> Float[Array, ""]:
                return loss(nnx.merge(graph, params)(features[rows], key), labels[rows]).loss

            updates, state = optimizer.update(jax.grad(value)(params), state)
            return (optax.apply_updates(params, jax.tree.map(jnp.multiply, updates, factors)), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, STEPS))[0][0]

    @jax.jit
    def predict(params: Any, test: Float[Array, "n d"]) -> tuple[Array, ...]:
        head = nnx.merge(graph, params)
        samples = head(test, jax.random.key(0), 1000), head(test, None)
        log_p = (mean_log_probabilities(some, jax.nn.log_softmax) for some in samples)
        return *log_p, head.noise_norm(test)

    def figures(data: Digits, seed: int) -> tuple[float, ...]:
        """Returns the accuracy, the log-likelihoods by samples and without noise, and the mean norm of the noise."""
        params = nnx.to_pure_dict(nnx.state(config.build(64, 10, nnx.Rngs(seed))))
        params = run(params, jnp.asarray(data.train, jnp.float32), jnp.asarray(data.train_labels), jax.random.key(seed))
        noisy, quiet, norm = map(np.asarray, predict(params, jnp.asarray(data.test, jnp.float32)))
        rows = np.arange(len(noisy)), data.test_labels
        accuracy = np.mean(noisy.argmax(axis=1) == data.test_labels)
        return float(accuracy), -float(noisy[rows].mean()), -float(quiet[rows].mean()), float(norm.mean())

    return figures


def main() -> None:
    """Prints means and standard errors over seeds, of classifiers trained with and without wrong labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    count = parser.parse_args().seeds
    functions: dict[str, Any] = {}
    for share in (0.4, 0.0):
        for name, (config, loss) in VARIANTS.items():
            figures = functions.setdefault(name, measured(config, loss))
            found = [figures(digits(seed, share), seed) for seed in range(1, 1 + count)]
            shown = ", ".join(estimate(values).shown(3) for values in zip(*found, strict=True))
            print(f"{share:.0%} wrong, {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
