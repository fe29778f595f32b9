"""Compiles small steps for four v5e chips and prints what the tests ask; started in a process of its own."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lit_het import sharding
from lit_het.configs import imagenet21k_het_xl, lit_e3_b32_het_xl, lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.models.predictor import Programs
from lit_het.planning import chips
from lit_het.planning.plan import Step, plan
from lit_het.planning.program import read_program
from lit_het.planning.roofline import roofline
from lit_het.sharding import MeshConfig
from lit_het.tasks import quantities
from tests import tiny

CONFIGS = {"lit": lit_so400m_het_xl, "classifier": imagenet21k_het_xl, "experts": lit_e3_b32_het_xl}


def small(name: str) -> ExperimentConfig:
    """Returns a shipped configuration with a few small blocks, and four devices in two pairs."""
    config = tiny.shrink(CONFIGS[name].get_config(), Path("data"), Path("run"))
    towers = {}
    for part in {"image_tower", "text_tower"} & {field.name for field in dataclasses.fields(config.task)}:
        tower = getattr(config.task, part)
        depth = 2 if tower.encoder.experts is None else 4
        encoder = dataclasses.replace(tower.encoder, depth=depth, compute_type="bfloat16")
        towers[part] = dataclasses.replace(tower, encoder=encoder)
    task = dataclasses.replace(config.task, **towers)
    mesh = MeshConfig(data=2, fsdp=2) if name != "experts" else MeshConfig(data=2, expert=2)
    return dataclasses.replace(config, task=task, data=dataclasses.replace(config.data, batch_size=64), mesh=mesh)


def evaluation(config: ExperimentConfig, devices: Sequence[Any]) -> dict[str, Any]:
    """Compiles what zero-shot evaluation runs: features of images, and probabilities of classes with noise."""
    mesh, task = config.mesh.build(devices), config.task.build()
    assert config.task.text_tower is not None
    programs, rows = Programs(task, mesh, None), sharding.batch_sharding(mesh)

    def shapes(tree: Any, places: Any) -> Any:
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    def array(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    params = shapes(task.shapes, sharding.tree_shardings(task.shapes, mesh))
    size, features = config.data.image_size, task.features
    images = array((64, size, size, 3), jnp.uint8, rows)
    classes = array((10, config.task.text_tower.embedding_size), jnp.float32, sharding.replicated(mesh))
    blocks, seeds = array((4, 16, features.size), jnp.float32, rows), array((4,), jnp.int32, rows)
    quantity, found = quantities.log_probabilities, {}
    noisy, _ = programs._program(quantity, programs._of_blocks(quantity), "num_samples")
    with jax.set_mesh(mesh):
        lowered = {
            "features": programs._program("features", features)[0].lower(params, images),
            "probabilities": noisy.lower(params, classes, (blocks, seeds), num_samples=8),
        }
    for name, one in lowered.items():
        text = one.compile().as_text()
        program = read_program(text, mesh)
        found[name] = {
            "collectives": [dataclasses.asdict(one) for one in program.collectives],
            "products": [dataclasses.asdict(one) for one in program.products],
            "unknown_loops": program.unknown_loops,
            **unwanted(text),
        }
    return found


def unwanted(text: str) -> dict[str, bool]:
    """Returns what no program for a TPU should have."""
    return {"float64": "f64[" in text, "callbacks": "xla_python" in text or "infeed(" in text}


# Eight devices that share parameters are no whole axes of most of these.
SLICES = (("v4-128", 1), ("v5p-128", 1), ("v6e-64", 1), ("v5e-128", 2), ("v5e-256", 8))


def meshes() -> list[dict[str, int]]:
    """Returns the sizes of meshes that can be laid over slices."""
    return [dict(MeshConfig(fsdp=8).build(chips.devices(chips.parse(*one))).shape) for one in SLICES]


# Of `scripts.studies.plan_chips`, which compiled them.
PLANNED = (
    (lit_so400m_het_xl, "v5e-256"),
    (lit_so400m_het_xl, "v6e-64"),
    (imagenet21k_het_xl, "v5e-64"),
    (lit_e3_b32_het_xl, "v5e-32"),
)


def formulas() -> list[tuple[str, str, int]]:
    """Returns configurations as they are, slices, and the bytes of a chip by formula."""
    found = []
    for module, name in PLANNED:
        config = module.get_config()
        mesh = config.mesh.build(chips.devices(chips.parse(name)))
        found.append((module.__name__.rpartition(".")[2], name, sum(Step(config, mesh).memory().values())))
    return found


def main() -> None:
    topology = chips.parse("v5e:2x2")
    devices, found = chips.devices(topology), {}
    others = {"meshes": meshes, "formulas": formulas, "evaluation": lambda: evaluation(small("lit"), devices)}
    for name in sys.argv[1:]:
        if name in others:
            found[name] = others[name]()
            continue
        config = small(name)
        made = plan(config, devices, name)
        header = made.compiled.text.partition("\n")[0]
        bounds = roofline(made.compiled.program, topology, made.flops)
        found[name] = {
            "collectives": [dataclasses.asdict(one) for one in made.compiled.program.collectives],
            "products": [dataclasses.asdict(one) for one in made.compiled.program.products],
            "compiled": made.compiled.arguments + made.compiled.temporary,
            "formula": sum(made.memory.values()),
            "state": sum(made.memory[part] for part in ("trainable parameters", "optimizer state")),
            "donated": header.count("-alias)"),
            # Adafactor's moments that a parameter does not have are constants of one element.
            "arrays of the state": sum(
                leaf.shape != (1,) for leaf in jax.tree.leaves(Step(config, made.mesh).inputs.state)
            ),
            "flops": [made.flops, made.compiled.program.product_flops * made.mesh.size],
            "unknown_loops": made.compiled.program.unknown_loops,
            **unwanted(made.compiled.text),
            "seconds": bounds.seconds,
            "mfu": bounds.mfu,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
