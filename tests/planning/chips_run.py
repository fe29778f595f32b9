"""Compiles small steps for four v5e chips and prints what the tests ask; started in a process of its own."""

import dataclasses
import json
import sys
from pathlib import Path

from lit_het.configs import imagenet21k_het_xl, lit_e3_b32_het_xl, lit_so400m_het_xl
from lit_het.planning import chips
from lit_het.planning.plan import plan
from lit_het.planning.roofline import roofline
from lit_het.sharding import MeshConfig
from tests import tiny

CONFIGS = {"lit": lit_so400m_het_xl, "classifier": imagenet21k_het_xl, "experts": lit_e3_b32_het_xl}


def main() -> None:
    topology = chips.parse("v5e:2x2")
    devices, found = chips.devices(topology), {}
    for name in sys.argv[1:]:
        config = tiny.shrink(CONFIGS[name].get_config(), Path("data"), Path("run"))
        towers = {}
        for part in {"image_tower", "text_tower"} & {field.name for field in dataclasses.fields(config.task)}:
            tower = getattr(config.task, part)
            depth = 2 if tower.encoder.experts is None else 4
            encoder = dataclasses.replace(tower.encoder, depth=depth, compute_type="bfloat16")
            towers[part] = dataclasses.replace(tower, encoder=encoder)
        task = dataclasses.replace(config.task, **towers)
        mesh = MeshConfig(data=2, fsdp=2) if name != "experts" else MeshConfig(data=2, expert=2)
        data = dataclasses.replace(config.data, batch_size=64)
        config = dataclasses.replace(config, task=task, data=data, mesh=mesh)
        made = plan(config, devices)
        header = made.compiled.text.partition("\n")[0]
        bounds = roofline(made.compiled.program, topology, made.flops)
        found[name] = {
            "collectives": [dataclasses.asdict(one) for one in made.compiled.program.collectives],
            "products": [dataclasses.asdict(one) for one in made.compiled.program.products],
            "compiled": made.compiled.arguments + made.compiled.temporary,
            "formula": sum(made.memory.values()),
            "state": sum(made.memory[part] for part in ("trainable parameters", "optimizer state")),
            "donated": header.count("-alias)"),
            "flops": [made.flops, made.compiled.program.product_flops * made.mesh.size],
            "unknown_loops": made.compiled.program.unknown_loops,
            "float64": "f64[" in made.compiled.text,
            "callbacks": "xla_python" in made.compiled.text or "infeed(" in made.compiled.text,
            "seconds": bounds.seconds,
            "mfu": bounds.mfu,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
