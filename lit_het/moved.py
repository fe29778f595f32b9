"""Modules that have moved: what files of users import under an old name is the module of the new one."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "lit_het.tasks.captioner": "lit_het.objectives.captioner",
    "lit_het.tasks.distillation": "lit_het.objectives.distillation",
    "lit_het.tasks.masking": "lit_het.objectives.masking",
    "lit_het.tasks.mixing": "lit_het.objectives.mixing",
    "lit_het.tasks.mixup": "lit_het.objectives.mixup",
    "lit_het.tasks.views": "lit_het.objectives.views",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        # Python returns what it finds under the name after this: the same module, not a second one.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install() -> None:
    """Lets imports find what has moved, after everything else."""
    sys.meta_path.append(_Moved())
