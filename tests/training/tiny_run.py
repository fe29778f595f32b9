"""A LiT task small enough to train for a few steps, with the batches, the mesh and the compiled step of a real run."""

import dataclasses
import functools

import jax
import numpy as np

from lit_het import distributed, parameters, sharding
from lit_het.heads.contrastive import HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.objectives.base import with_starts
from lit_het.sharding import MeshConfig
from lit_het.tasks.base import Gradient
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import averaged, initial_state, make_step, of_trainable, plain_gradient
from lit_het.types import Batch
from tests.tasks import meshes

ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)
TASK = ContrastiveConfig(
    image_tower=ViTConfig(8, 4, ENCODER, pooling="mean"),
    text_tower=TextConfig(vocabulary_size=20, length=4, embedding_size=16, encoder=ENCODER),
    head=HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5), num_samples=2),
)
BATCH_SIZE, STEPS = 16, 6
ONE_DEVICE = MeshConfig(data=1).build(jax.devices()[:1])


def host_batches(count=STEPS):
    """The same batches at every call; some rows are invalid."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield Batch(
            valid=random.random(BATCH_SIZE) < 0.9,
            image=random.integers(0, 256, (BATCH_SIZE, 8, 8, 3), dtype=np.uint8),
            text=random.integers(0, 20, (BATCH_SIZE, 4)).astype(np.int32),
        )


@functools.cache
def _compiled(mesh, config, seed, average_decay, gradient_of):
    """Returns the programs of runs that are equal: what starts one, and its step."""
    length = RunLength(STEPS, BATCH_SIZE)
    config = with_starts(config, length)
    task = config.build()
    optimizer = Optimizer().build(Schedule(1e-2, Duration(1)), length, late=task.late_parts)

    def start(params):
        locked, trainable = parameters.partition(params, task.locked)
        return initial_state(trainable, optimizer, averages=average_decay is not None), locked

    shardings = sharding.tree_shardings(jax.eval_shape(start, task.shapes), mesh)
    step = make_step(of_trainable(task.loss, gradient_of or plain_gradient), optimizer, seed)
    step = step if average_decay is None else averaged(step, average_decay)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings[0], None))
    return jax.jit(start, out_shardings=shardings), step


@dataclasses.dataclass
class Run:
    """What `lit_het.training.train` puts together, without files."""

    mesh: jax.sharding.Mesh = dataclasses.field(default_factory=lambda: ONE_DEVICE)
    config: ContrastiveConfig = TASK
    seed: int = 0
    average_decay: float | None = 0.5
    gradient_of: Gradient | None = None

    def __post_init__(self):
        start, self.step = _compiled(**vars(self))
        self.state, self.locked = start(jax.device_get(meshes.start(self.config, self.seed)[1]))

    def batches(self, first=0):
        """Global batches from number ``first`` on."""
        return (distributed.to_global(batch, self.mesh) for batch in list(host_batches())[first:])
