"""The rules of docs/architecture.md that a parser can check: who may import whom, and how a module looks."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("lit_het", "data_pipelines", "eval", "configs")
MODULES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
# lit_het.cli → configs → eval → data_pipelines → lit_het: a room sees the rooms with lower numbers.
FLOORS = {"lit_het": 0, "data_pipelines": 1, "eval": 2, "configs": 3, "lit_het.cli": 4}


def room(module):
    """Returns the top-level room of a module, the command line being one of its own."""
    return "lit_het.cli" if (module + ".").startswith("lit_het.cli.") else module.split(".")[0]


def imports(name, tree):
    """Returns every module that ``import`` and ``from ... import`` reach, wherever they stand."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # `from package import module` reaches the module, `from module import name` the module itself.
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return found


IMPORTS = {name: imports(name, tree) for name, tree in TREES.items()}


def ours(name):
    return {module for module in IMPORTS[name] if module.split(".")[0] in PACKAGES}


def test_the_tree_was_found():
    assert {
        "lit_het.heads.covariance",
        "lit_het.cli.main",
        "data_pipelines.loader",
        "eval.evaluators.zero_shot",
    } <= set(MODULES)
    assert "lit_het.tasks.base" in IMPORTS["lit_het.training.step"]


@pytest.mark.parametrize("name", MODULES)
def test_imports_never_go_up(name):
    floor = FLOORS[room(name)]
    upward = {module for module in ours(name) if FLOORS[room(module)] > floor}
    assert not upward, f"{name} imports {upward}"


def test_only_the_command_line_and_recipes_import_learner_data_evaluation_and_configurations_together():
    together = {n for n in MODULES if {"data_pipelines", "eval", "configs"} <= {room(m) for m in ours(n)}}
    assert {room(name) for name in together} <= {"lit_het.cli", "configs"}


def subpackage(module):
    """Returns "heads" for lit_het.heads.covariance and "" for lit_het.types."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and module in PACKAGE_NAMES) else ""


PACKAGE_NAMES = {name for name, path in MODULES.items() if path.name == "__init__.py"}
# Which other subpackages of lit_het each may import; modules at the root (types, errors, ...) are free to all.
ALLOWED = {
    "": set(),
    "towers": set(),
    "heads": set(),
    "losses": set(),
    "tasks": {"towers", "heads", "losses"},
    "training": {"tasks"},
    "checkpoints": {"towers"},  # importers infer a tower from a file
    "shape_law": set(),
    "planning": set(),
    "cli": {"towers", "heads", "losses", "tasks", "training", "checkpoints", "shape_law", "planning"},
}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("lit_het")])
def test_subpackages_of_the_learner_keep_their_order(name):
    own = subpackage(name)
    reached = {subpackage(module) for module in ours(name) if module.startswith("lit_het.")} - {"", own}
    assert reached <= ALLOWED[own], f"{name} imports {reached - ALLOWED[own]}"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("lit_het.training")])
def test_training_knows_of_tasks_only_what_a_task_is(name):
    of_tasks = {module for module in ours(name) if module.startswith("lit_het.tasks")}
    assert of_tasks <= {"lit_het.tasks.base"}


def literals(tree):
    """Returns all strings that are not docstrings or parts of messages."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def identifiers(tree):
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}


@pytest.mark.parametrize("name", MODULES)
def test_only_sharding_knows_the_axes_of_the_mesh(name):
    known = literals(TREES[name]) & {"fsdp", "expert"} or identifiers(TREES[name]) & {"PartitionSpec", "P"}
    assert bool(known) == (name == "lit_het.sharding"), f"{name}: {known}"


@pytest.mark.parametrize("name", MODULES)
def test_only_checkpoints_of_runs_know_orbax(name):
    knows = any(module.split(".")[0] == "orbax" for module in IMPORTS[name])
    assert knows == (name in ("lit_het.checkpoints.native", "lit_het.checkpoints.saved_step"))


@pytest.mark.parametrize("name", MODULES)
def test_only_one_module_draws_noise(name):
    """Gaussian noise on features or embeddings comes from heads/covariance.py alone; initializers are not meant.

    A mixture of experts has noise of its own, on the logits of its router.
    """
    calls = {ast.unparse(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)}
    draws = {call for call in calls if re.fullmatch(r"(jax\.)?random\.(normal|multivariate_normal)", call)}
    if name.startswith("lit_het"):
        assert not draws or name in ("lit_het.heads.covariance", "lit_het.towers.experts")


@pytest.mark.parametrize("name", MODULES)
def test_modules_stay_short_and_none_is_called_utils(name):
    assert len(MODULES[name].read_text().splitlines()) <= 400
    assert MODULES[name].stem not in ("utils", "util", "helpers", "misc", "common")


@pytest.mark.parametrize("name", MODULES)
def test_only_the_log_and_the_command_line_print(name):
    prints = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(TREES[name])
    )
    assert not prints or name == "lit_het.training.logging" or room(name) == "lit_het.cli"


def public(tree, prefix=""):
    """Yields (name, node) of public classes, functions and methods, not of functions within functions."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    assert ast.get_docstring(TREES[name]), name
    missing = [path for path, node in public(TREES[name]) if not ast.get_docstring(node)]
    assert not missing


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_pickled_and_no_class_is_named_by_a_string(name):
    # The one reader of pickles admits nothing but arrays and plain values.
    pickles = {module.split(".")[0] for module in IMPORTS[name]} & {"pickle", "dill", "cloudpickle"}
    assert not pickles or name == "data_pipelines.prepare.unpickler"
    # A configuration file is loaded by its path, never looked up by a name.
    calls = {ast.unparse(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)}
    assert not calls & {"importlib.import_module", "__import__", "eval", "exec"}


def test_a_violation_would_be_seen():
    """The checks above read this tree as they should."""
    MODULES["lit_het.heads.example"] = Path("example.py")
    try:
        tree = ast.parse(
            "from lit_het.towers import vit\ndef f():\n    from ..losses import base\n    import eval.report"
        )
        found = imports("lit_het.heads.example", tree)
    finally:
        del MODULES["lit_het.heads.example"]
    assert found == {"lit_het.towers.vit", "lit_het.losses.base", "eval.report"}
    assert {subpackage(module) for module in found if module.startswith("lit_het")} == {"towers", "losses"}
    assert room("lit_het.cli") == room("lit_het.cli.main") == "lit_het.cli"
    assert room("lit_het.clicks") == "lit_het"
    assert [path for path, _ in public(ast.parse("class A:\n  def b(self): pass\n  def _c(self): pass"))] == [
        "A",
        "A.b",
    ]
