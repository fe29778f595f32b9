"""A run's first parameters, on one device and on several."""

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import quickstart_lit_het_xl
from lit_het.sharding import MeshConfig
from tests import tiny


@pytest.mark.devices
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=4)], ids=["data=8", "fsdp=4"])
def test_one_program_draws_on_a_mesh_what_is_drawn_one_by_one(mesh, tmp_path, draw_at_once):
    task = tiny.shrink(quickstart_lit_het_xl.get_config(), tmp_path, tmp_path / "run").task.build()
    expected = parameters.flatten(task.initialize(jax.random.key(3)))
    paths = frozenset(path for path in expected if not path.startswith("image_tower/"))  # which may be loaded
    found = draw_at_once(task, mesh.build(), paths)(jax.random.key(3))
    assert found.keys() == paths
    for path, array in found.items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-6, atol=1e-7, err_msg=path)
        assert len(array.sharding.device_set) == 8
    split = [path for path, array in found.items() if not array.sharding.is_fully_replicated]
    assert bool(split) == (mesh.fsdp > 1)
