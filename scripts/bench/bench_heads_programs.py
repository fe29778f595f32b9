"""A classification head at a size, as a program that computes the loss and its gradient, and its operations."""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from lit_het.heads.classification_config import DeterministicConfig, HetConfig, HetHConfig, HetXLConfig
from lit_het.heads.het_h import GATHER_COST
from lit_het.heads.noise_config import logits_at_once
from lit_het.heads.sampling import is_factored
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.planning import costs
from lit_het.planning.plan import COPIES_OF_LOGITS
from lit_het.types import LogitSamples
from scripts.bench.tools import Program

NoisyConfig: TypeAlias = HetConfig | HetHConfig | HetXLConfig
Config: TypeAlias = DeterministicConfig | NoisyConfig

OPERATIONS_NOTE = (
    "GFLOP: multiply-adds of matrix products, times two; forward, backward and what the backward pass computes anew. "
    "Element-wise work (normals, exp, sums over classes; HET-H's moves of noise to classes) is left out: where that is "
    "much, GFLOP/s looks low, and for HET-H the operations predict no ratio of orders."
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a measurement.

    Attributes:
        batch: b.
        features: d.
        classes: k.
        samples: S.
    """

    batch: int
    features: int
    classes: int
    samples: int


class Head:
    """A head at a size.

    Attributes:
        is_factored: whether the noise's factors are mapped to logits, instead of every sample.
        examples, samples_per_block: how much exists at a time.
        gflop: of a call, see `OPERATIONS_NOTE`.

    Args:
        config: of the head.
        size: its sizes.
        at_once: whether all samples of all examples exist at the same time, as in the paper, instead of blocks.
    """

    def __init__(self, config: Config, size: Size, *, at_once: bool = False):
        self._config, self._size, self._at_once = config, size, at_once
        build = functools.partial(config.build, size.features, size.classes)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        self._initialize = lambda: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(0))))
        plan = self._plan()
        self.samples_per_block = plan.samples_per_block
        # A block holds equal numbers of examples.
        self.examples = max(n for n in range(1, size.batch + 1) if size.batch % n == 0 and n <= plan.examples_per_block)
        self.is_factored = _is_factored(config, size)
        self.gflop = _multiply_adds(config, size, self.is_factored, plan.samples_per_block) * 2 / 1e9

    def program(self, *, runs: bool = True) -> Program:
        """Compiles value and gradient; only shapes are made up for a program that does not run."""
        inputs = jax.jit(self._inputs)() if runs else jax.eval_shape(self._inputs)
        return Program.of(self._value_and_grad, *inputs)

    def planned_bytes(self) -> int:
        """Returns the memory of a call by the formulas of ``lit-het plan``."""
        params, features, label, key = jax.eval_shape(self._inputs)

        def rest(rows: int) -> tuple[Any, ...]:
            return *(jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in (features, label)), key

        values = costs.intermediate_bytes(self._loss, params, rest, self._size.batch)
        # A block does not grow with the batch, so that it is not among the intermediate values.
        logits = logits_at_once(self._config.sampling, self._size.batch, self._size.classes)
        block = 0 if self._at_once else 4 * COPIES_OF_LOGITS * logits
        return 2 * costs.tree_bytes((params, features)) + values.saved + max(values.forward, values.backward) + block

    def _inputs(self) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        size = self._size
        features = jax.random.normal(jax.random.key(1), (size.batch, size.features))
        label = jax.random.randint(jax.random.key(2), (size.batch,), 0, size.classes)
        return self._initialize(), features, label, jax.random.key(3)

    def _value_and_grad(self, params: Any, features: jax.Array, label: jax.Array, key: jax.Array) -> Any:
        return jax.value_and_grad(self._loss, argnums=(0, 1))(params, features, label, key)

    def _loss(self, params: Any, features: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
        samples = self._samples(params, features, key)
        return SoftmaxCrossEntropy()(samples, label, jnp.ones(features.shape[0], bool)).loss

    def _samples(self, params: Any, features: jax.Array, key: jax.Array) -> LogitSamples:
        samples = nnx.merge(self._graph, params)(features, key)
        if not self._at_once:
            return samples
        return dataclasses.replace(samples, examples_per_block=features.shape[0], samples_per_block=samples.num_samples)

    def _plan(self) -> LogitSamples:
        plans: list[LogitSamples] = []

        def trace() -> None:
            params, features, _, key = self._inputs()
            plans.append(self._samples(params, features, key))

        jax.eval_shape(trace)
        return plans[0]


def _multiply_adds(config: Config, size: Size, factored: bool, samples_per_block: int) -> float:
    """Returns multiply-adds of matrix products, forward and backward.

    A product costs as much for each of its two gradients. Normals have none, so that a product of them with factors has
    one gradient. More than one block of samples computes a sample's products once more in the backward pass.
    """
    d, k = size.features, size.classes
    if isinstance(config, DeterministicConfig):
        return 3.0 * size.batch * d * k
    again = int(samples_per_block < size.samples)
    rows, q = config.covariance.num_factors, _noise_size(config, size)
    scales = 2 * d * q
    # Products of normals and rows of V(x) or J, of a sample; the row of d(x) is element-wise unless it is mapped.
    if isinstance(config, HetXLConfig) and not factored:
        base = 0 if config.unshared_size is None else d * k
        of_sample = (2 + again) * rows * q + (3 + again) * q * k
        return float(size.batch) * (3 * (base + scales) + size.samples * of_sample)
    mapped = (rows + 1) * q * k if isinstance(config, HetXLConfig) else 0
    width = q if isinstance(config, HetHConfig) and not factored else k
    return float(size.batch) * (3 * (d * k + scales + mapped) + size.samples * (2 + again) * rows * width)


def _noise_size(config: NoisyConfig, size: Size) -> int:
    if isinstance(config, HetHConfig):
        return config.num_buckets
    return size.classes if isinstance(config, HetConfig) else config.unshared_size or size.features


def _is_factored(config: Config, size: Size) -> bool:
    if isinstance(config, DeterministicConfig | HetConfig):
        return False
    return is_factored(
        config.sampling.order,
        config.covariance,
        noise_size=_noise_size(config, size),
        num_classes=size.classes,
        num_samples=size.samples,
        cost=GATHER_COST * size.classes if isinstance(config, HetHConfig) else None,
    )
