import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lit_het import distributed, sharding
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import SGD, Adafactor, AdamW, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.types import Batch

pytestmark = pytest.mark.devices
MESH = MeshConfig(fsdp=2).build()


def spec(path, shape, mesh=MESH):
    """Returns the sharding of one leaf at a path, without trailing Nones."""
    tree = jax.ShapeDtypeStruct(shape, jnp.float32)
    for name in reversed(path.split("/")):
        tree = {name: tree}
    parts = list(jax.tree.leaves(sharding.tree_shardings(tree, mesh))[0].spec)
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("text_tower/encoder/blocks/attention/query/kernel", (12, 16, 16), (None, None, "fsdp")),
        ("text_tower/encoder/blocks/mlp/up/kernel", (12, 16, 64), (None, None, "fsdp")),
        ("text_tower/encoder/blocks/mlp/down/kernel", (12, 64, 16), (None, "fsdp")),
        ("text_tower/pooling/attention/out/kernel", (16, 16), ("fsdp",)),
        ("text_tower/tokens/embedding", (32_000, 16), ("fsdp",)),
        ("head/logits/kernel", (16, 1000), (None, "fsdp")),
        ("head/text_covariance/factors/kernel", (16, 240), (None, "fsdp")),
        ("text_tower/encoder/blocks/mlp/up/bias", (12, 64), ()),
        ("text_tower/positions", (16, 16), ()),
        ("head/temperature/log_temperature", (), ()),
    ],
)
def test_parameters_follow_the_rules(path, shape, expected):
    assert spec(path, shape) == expected
    # A dimension that two devices cannot halve is repeated.
    odd = tuple(size + 1 - size % 2 for size in shape)
    assert spec(path, odd) == ()


def test_stacked_blocks_are_never_split_along_the_depth():
    for path in ("blocks/mlp/up/kernel", "blocks/mlp/down/kernel", "blocks/mlp/up/bias"):
        assert spec(f"text_tower/encoder/{path}", (12, 16, 16))[:1] in ((), (None,))


def test_every_rule_names_axes_of_the_mesh_and_the_last_matches_everything():
    used = {axis for _, axes in sharding.RULES for axis in axes if axis}
    assert used <= set(sharding.AXES) == set(MESH.axis_names)
    assert sharding.RULES[-1] == (".*", ())


@pytest.mark.parametrize("rule", [AdamW(), Adafactor(), Adafactor(momentum_type="float32", clip_rms=1.0), SGD()])
def test_optimizer_moments_are_split_like_their_parameters(rule):
    params = {"text_tower": {"mlp": {"up": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}}}
    state = jax.eval_shape(Optimizer(rule).build(Schedule(warmup=Duration(1)), RunLength(10, 8)).init, params)
    shardings = sharding.tree_shardings(state, MESH)
    found = {
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)
    }
    moments = {AdamW: {"mu", "nu"}, Adafactor: {"ema"}, SGD: {"trace"}}[type(rule)]
    for moment in moments:
        kernels = [s for path, s in found if f"/{moment}/" in path and path.endswith("up/kernel")]
        assert kernels == [PartitionSpec(None, "fsdp")]
    jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state), out_shardings=shardings)()


def test_eight_devices_clip_the_updates_of_a_stack_as_one_does():
    random = np.random.default_rng(0)
    params = {"blocks": {"up": {"kernel": np.float32(random.normal(size=(3, 64, 32)))}}}
    optimizer = Optimizer(Adafactor(clip_rms=0.5)).build(Schedule(1e-2, Duration(0)), RunLength(10, 8))

    def two_steps(params):
        state = optimizer.init(params)
        for scale in (1.0, 2.0):
            updates, state = optimizer.update(jax.tree.map(lambda p, scale=scale: scale * p**3, params), state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return params

    shardings = sharding.tree_shardings(params, MESH)
    assert shardings["blocks"]["up"]["kernel"].spec == PartitionSpec(None, None, "fsdp")
    found = jax.jit(two_steps, out_shardings=shardings)(jax.device_put(params, shardings))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, jax.jit(two_steps)(params))


def test_a_mesh_takes_the_devices_that_the_other_axes_leave():
    assert dict(MESH.shape) == {"data": 4, "fsdp": 2, "expert": 1}
    assert dict(MeshConfig().build().shape) == {"data": 8, "fsdp": 1, "expert": 1}
    assert MeshConfig(data=2).build(jax.devices()[:2]).size == 2


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        (MeshConfig(fsdp=-1), 8, (1, 8, 1)),
        (MeshConfig(fsdp=-1), 6, (3, 2, 1)),
        (MeshConfig(fsdp=-1), 1, (1, 1, 1)),
        (MeshConfig(expert=-1), 4, (1, 1, 4)),
        (MeshConfig(fsdp=-1, expert=2), 8, (1, 4, 2)),
        (MeshConfig(data=4, fsdp=-1), 4, None),
    ],
)
def test_an_open_mesh_takes_near_devices_for_parameters_and_the_rest_for_batches(config, devices, shape):
    if shape is None:
        with pytest.raises(UserError, match="does not fit 4 devices"):
            config.build(jax.devices()[:devices])
    else:
        assert config.build(jax.devices()[:devices]).devices.shape == shape


def test_near_devices_lie_in_one_slice():
    devices = [DeviceOfASlice(number, number // 4) for number in range(8)]
    assert dict(MeshConfig(fsdp=-1).build(devices).shape) == {"data": 2, "fsdp": 4, "expert": 1}


@pytest.mark.parametrize("sizes", [{"fsdp": 0}, {"data": 0}, {"expert": -2}, {"fsdp": -1, "expert": -1}])
def test_invalid_mesh_sizes_are_refused_with_their_flags(sizes):
    with pytest.raises(UserError, match=f"--mesh.{next(iter(sizes))} " if len(sizes) > 1 else "must be at least 1"):
        MeshConfig(**sizes)


@pytest.mark.parametrize("config", [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(fsdp=16)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_its_flags(config):
    with pytest.raises(UserError, match=r"^[^\n]*does not fit 8 devices; change --mesh.data, --mesh.fsdp[^\n]*\Z"):
        config.build()


@pytest.mark.parametrize(("size", "advice"), [(12, "8 or 16"), (5, "8"), (17, "16 or 24")])
def test_a_batch_that_the_devices_cannot_share_is_refused_with_the_sizes_that_work(size, advice):
    with pytest.raises(UserError) as error:
        sharding.check_batch_size(size, MESH)
    problem = f"batch size {size} is not divisible by the 8 devices that share it"
    assert str(error.value) == f"{problem}; use --data.batch-size {advice}"


@pytest.mark.parametrize("size", [8, 16, 256])
def test_a_batch_that_the_devices_can_share_is_accepted(size):
    sharding.check_batch_size(size, MESH)


def test_batches_are_split_over_all_devices():
    image = np.arange(16 * 2 * 2 * 3, dtype=np.uint8).reshape(16, 2, 2, 3)
    batch = distributed.to_global(Batch(valid=np.ones(16, bool), image=image), MESH)
    assert batch.text is None
    assert isinstance(batch.image, jax.Array)
    assert batch.image.sharding.shard_shape(batch.image.shape) == (2, 2, 2, 3)
    assert len({shard.index[0].start for shard in batch.image.addressable_shards}) == 8
    np.testing.assert_array_equal(batch.image, image)
    assert sharding.num_batch_shards(MESH) == 8
    assert sharding.num_batch_shards(MeshConfig(data=2, expert=4).build()) == 8


@dataclasses.dataclass(frozen=True)
class DeviceOfASlice:
    """As much of a TPU's device as the layout of a mesh asks for."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "any"
    process_index: int = 0


def test_only_the_data_axis_crosses_slices():
    devices = [DeviceOfASlice(number, number % 2) for number in range(16)]
    mesh = MeshConfig(fsdp=2, expert=2).build(devices)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "expert": 2}
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.reshape(4, -1).tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    with pytest.raises(UserError, match="mesh data = 1 must be a multiple of the number of slices, 2"):
        MeshConfig(fsdp=16).build(devices)
