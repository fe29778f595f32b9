"""The rules of docs/architecture.md that a parser can check: who may import whom, and how a module looks."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# These lie at the top of the repository and are imported as parts of lit_het.
LINKED = ("data_pipelines", "eval", "configs")
MODULES = {
    prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for prefix, folder in (("", "lit_het"), *(("lit_het.", name) for name in LINKED))
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache  # not when the tests are collected, which every worker does
def tree_of(name):
    return ast.parse(MODULES[name].read_text())


def trees():
    return ((name, tree_of(name)) for name in MODULES)


# The half of training that knows neither data nor runs.
CORE = {
    f"training.{name}"
    for name in (
        *("cadence", "durations", "isotropic_noise", "lock", "log", "loop", "optimizers", "optimizers_config"),
        *("optax_table", "preemption", "schedules", "step", "tracking"),
    )
}
# What opens and writes runs, beside the readers and writers of formats.
PLANS = (f"planning.{name}" for name in ("plan", "alternatives", "slices", "tables", "page", "report"))
COMMANDS_OF_WEIGHTS = {
    f"weights.{name}"
    for name in ("cards", "exporting", "importing", "native.inspection", "onnx.folder", "portable", "publishing")
}
# A package or module sees those with equal and lower numbers; what is not named here is the learner, 0.
LEVELS = {
    **dict.fromkeys(("data_pipelines", "weights"), 1),
    "eval": 2,
    "configs": 3,
    **dict.fromkeys(("training", "models", *COMMANDS_OF_WEIGHTS, *PLANS), 4),
    **dict.fromkeys(CORE, 0),
    "training.directory": 3,
    **dict.fromkeys(("search", "sklearn", "apps"), 5),
    "search.law": 0,
    "cli": 6,
}
# `import lit_het` and `python -m lit_het` lead to all of it.
ENTRIES = {"lit_het", "lit_het.api", "lit_het.__main__"}


def package_of(module):
    """Returns "heads" for lit_het.heads.covariance and "" for lit_het.types."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and module in PACKAGES) else ""


PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def when_loaded(node):
    """Yields the nodes that run when a module is imported: none within functions, none for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        only_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not only_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from when_loaded(child)


def imports(name, tree, nodes=ast.walk):
    """Returns every module that ``import`` and ``from ... import`` reach, wherever they stand."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes(tree):
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


@functools.cache
def imports_of(name):
    return imports(name, tree_of(name))


def ours(name):
    return {module for module in imports_of(name) if module.split(".")[0] == "lit_het"}


def at_import(name):
    """Returns the modules that a module imports when it is imported itself."""
    return imports(name, tree_of(name), when_loaded)


def loaded_with(name):
    """Returns the modules of lit_het that are loaded when a module is imported, itself included."""
    found, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module in MODULES and module not in found:
            found.add(module)
            waiting += {*at_import(module), module.rpartition(".")[0]}  # a package is loaded before its modules
    return found


def test_the_tree_was_found():
    some = ("heads.covariance", "cli.main", "data_pipelines.shards.loader", "eval.evaluators.zero_shot")
    assert {f"lit_het.{name}" for name in some} <= set(MODULES)
    assert "lit_het.tasks.base" in imports_of("lit_het.training.step")


def test_folders_at_the_top_are_parts_of_the_package():
    for name in LINKED:
        assert (ROOT / "lit_het" / name).is_symlink()
        assert (ROOT / "lit_het" / name).resolve() == ROOT / name
    outside = {name: module for name in MODULES for module in imports_of(name) if module.split(".")[0] in LINKED}
    assert not outside


def level(module):
    """Returns the number of the longest name in `LEVELS` that the module's name begins with."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((LEVELS[name] for name in names if name in LEVELS), 0)


def test_imports_never_go_up():
    names = MODULES.keys() - ENTRIES
    upward = {name: {module for module in ours(name) if level(module) > level(name)} for name in names}
    assert not {name: found for name, found in upward.items() if found}


# Which other packages of the learner each may import; modules at the root (types, errors, ...) are free to all.
ALLOWED = {
    "": set(),
    "towers": set(),
    "heads": set(),
    "losses": set(),
    "objectives": {"towers", "heads", "losses"},
    "tasks": {"towers", "heads", "losses", "objectives"},
    "training": {"tasks"},
    "weights": {"towers", "data_pipelines"},  # importers infer a tower from a file
    "planning": set(),
    "search": set(),
}
# Fields of configurations, which everything may have.
SETTINGS = {"lit_het.training.durations", "lit_het.training.optimizers_config"}


def test_packages_of_the_learner_keep_their_order():
    for name in MODULES.keys() - ENTRIES:
        own = package_of(name)
        if own in ALLOWED and level(name) <= 1:
            reached = {package_of(module) for module in ours(name) - SETTINGS} - {"", own}
            assert reached <= ALLOWED[own], f"{name} imports {reached - ALLOWED[own]}"


def test_training_imports_only_the_protocol_of_tasks():
    for name in MODULES:
        if name.removeprefix("lit_het.") in CORE:
            assert {module for module in ours(name) if package_of(module) == "tasks"} <= {"lit_het.tasks.base"}


CONFIGURATIONS = ("lit_het.tasks.contrastive", "lit_het.tasks.classification")


def test_only_configurations_of_tasks_and_configuration_files_name_objectives():
    shared = {f"lit_het.objectives.{name}" for name in ("base", "tokens")}
    for name in MODULES.keys() - set(CONFIGURATIONS):
        if package_of(name) not in ("objectives", "configs"):
            named = {module for module in ours(name) if package_of(module) == "objectives"}
            assert named <= shared, f"{name} names {named - shared}"


def classes_asked_for(tree):
    """Returns the words of all classes in calls of isinstance and in patterns of match."""
    questions = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    )
    patterns = (node.cls for node in ast.walk(tree) if isinstance(node, ast.MatchClass))
    return {
        word
        for kind in (*(call.args[1] for call in questions), *patterns)
        for word in re.findall(r"\w+", ast.unparse(kind))
    }


def test_configurations_are_asked_and_not_told_by_their_classes():
    """The questions are in `options.py` of heads, tasks and evaluations, `towers/base.py`, and attributes of losses."""
    classes = {
        node.name
        for name in MODULES
        if package_of(name) in ("towers", "heads", "tasks", "losses", "objectives", "configs")
        or name.endswith(("_config", "suite"))
        for node in tree_of(name).body
        if isinstance(node, ast.ClassDef)
    }
    assert classes >= {
        "ViTConfig",
        "SigmoidLoss",
        "SigmoidCrossEntropy",
        "EnsembleConfig",
        "WriteCaptionsConfig",
        "AdamW",
    }
    for name in MODULES:
        if package_of(name) in ("tasks", "objectives", "losses", "training", "models", "planning"):
            # The base class tells which fields of a task are objectives.
            assert not classes_asked_for(tree_of(name)) & classes - {"Objective"}, name


def test_importing_the_package_imports_next_to_nothing():
    assert loaded_with("lit_het") == {"lit_het", "lit_het.errors", "lit_het.moved"}
    assert "lit_het.api" in ours("lit_het")  # when a name is used


READERS = ("weights.big_vision", "weights.huggingface", "weights.vmoe", "weights.formats")


@pytest.mark.parametrize(
    ("module", "rare"),
    [
        ("api", ("training.train", "models.evaluation", "apps.embed")),
        ("configs.experiment", ("eval.evaluators", "eval.features", "eval.sets.open_sets")),
        (
            "training.train",
            (
                *("eval.evaluators", "eval.evaluation", "eval.metrics", "eval.sets.open_sets", "training.evaluating"),
                *("data_pipelines.shards.stream", "data_pipelines.embeddings", "data_pipelines.texts.tokenizers."),
                *("models.opening", "models.predictor", "models.pretrained", "models.calibration.saved"),
                *("tasks.classifier", "tasks.two_towers", "tasks.generation", "towers.vit", "heads.contrastive."),
                *("training.tracking", "weights.native.inspection", "planning", *READERS),
            ),
        ),
    ],
)
def test_models_configurations_and_training_load_nothing_that_only_others_need(module, rare):
    loaded = loaded_with(f"lit_het.{module}") - {f"lit_het.{module}"}
    # A dot at the end of a name stands for the module itself, where others begin like it.
    assert not {name for name in loaded if f"{name}.".removeprefix("lit_het.").startswith(rare)}


def test_modules_do_not_import_one_another_in_a_circle():
    """A configuration imports what it builds when it builds it."""
    graphlib.TopologicalSorter({name: at_import(name) & MODULES.keys() - {name} for name in MODULES}).prepare()


# A configuration is read by every command, and before any work: it has fields and checks, and `build()` imports the
# rest.
HEAVY = {"flax", "optax", "orbax", "grain", "torch", "transformers", "fsspec", "webdataset", "sentencepiece"}
HEAVY |= {"tokenizers", "cv2", "PIL", "simplejpeg", "scipy", "matplotlib", "rich"}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.endswith("_config")))
def test_configurations_import_no_library_that_only_their_work_needs(name):
    assert not {module.split(".")[0] for loaded in loaded_with(name) for module in at_import(loaded)} & HEAVY


def test_a_configuration_file_loads_fields_and_checks():
    """Without the work of towers, heads, losses and data; the limit is that which one can read in an hour."""
    loaded = loaded_with("lit_het.configs.lit_so400m_het_xl")
    assert not {module.split(".")[0] for name in loaded for module in at_import(name)} & HEAVY
    assert sum(len(MODULES[name].read_text().splitlines()) for name in loaded) < 10_900


def test_the_list_of_commands_loads_no_command():
    loaded = {name.removeprefix("lit_het.") for name in loaded_with("lit_het.cli.main")}
    assert loaded == {
        "lit_het",
        "cli",
        "cli.main",
        "errors",
        "eval",
        "eval.evaluators",
        "library_logs",
        "moved",
        "stopping",
    }


def test_flags_are_checked_before_orbax_and_grain_are_loaded():
    external = {module.split(".")[0] for name in loaded_with("lit_het.configs.parsing") for module in at_import(name)}
    assert not external & {"orbax", "grain", "matplotlib", "safetensors"}


@pytest.mark.parametrize(
    "module", ["weights.exporting", "weights.importing", "models.model", "weights.huggingface.exporting"]
)
def test_only_the_writers_for_hugging_face_load_transformers(module):
    loaded = {external for name in loaded_with(f"lit_het.{module}") for external in at_import(name)}
    assert ("transformers" in loaded) == (module == "weights.huggingface.exporting")


def literals(tree):
    """Returns all strings that are not docstrings or parts of messages."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def identifiers(tree):
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}


def calls(tree):
    """Returns the names of all functions that are called."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_only_sharding_names_the_axes_of_the_mesh():
    knowing = {
        name
        for name, tree in trees()
        if literals(tree) & {"fsdp", "expert"} or identifiers(tree) & {"PartitionSpec", "P"}
    }
    assert knowing == {"lit_het.sharding"}


def importing(library):
    return {name for name in MODULES if any(module.split(".")[0] == library for module in imports_of(name))}


def test_only_checkpoints_of_runs_import_orbax_and_only_its_own_package_imports_scikit_learn():
    assert importing("orbax") == {"lit_het.weights.native.saving", "lit_het.weights.native.saved_step"}
    assert {package_of(name) for name in importing("sklearn")} == {"sklearn"}


def test_only_one_module_draws_noise():
    """Gaussian noise on features or embeddings comes from heads/covariance.py alone; initializers are not meant.

    A mixture of experts has noise of its own, on the logits of its router, and data pipelines draw with NumPy.
    """
    drawing = {
        name
        for name, tree in trees()
        if package_of(name) not in ("data_pipelines", "eval")
        and any(re.fullmatch(r"(jax\.)?random\.(normal|multivariate_normal)", call) for call in calls(tree))
    }
    assert drawing == {"lit_het.heads.covariance", "lit_het.towers.experts"}


def test_modules_stay_short_and_none_is_called_utils():
    assert not [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 400]
    assert not {path.stem for path in MODULES.values()} & {"utils", "util", "helpers", "misc", "common"}


def test_only_the_console_commands_and_applications_print():
    printing = {name for name, tree in trees() if "print" in calls(tree)}
    assert {
        name
        for name in printing
        if package_of(name) not in ("cli", "models", "planning", "search", "apps", "training", "weights")
    } <= {"lit_het.console"}


def public(tree, prefix=""):
    """Yields (name, node) of public classes, functions and methods, not of overloads and functions within functions."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if "overload" not in map(ast.unparse, node.decorator_list):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node, f"{prefix}{node.name}.")


def test_everything_public_has_a_docstring():
    missing = [name for name, tree in trees() if not ast.get_docstring(tree)]
    missing += [
        f"{name}.{path}" for name in MODULES for path, node in public(tree_of(name)) if not ast.get_docstring(node)
    ]
    assert not missing


def test_nothing_is_pickled_and_no_class_is_named_by_a_string():
    for name, tree in trees():
        # The one reader of pickles admits nothing but arrays and plain values.
        pickles = {module.split(".")[0] for module in imports_of(name)} & {"pickle", "dill", "cloudpickle"}
        assert not pickles or name == "lit_het.data_pipelines.prepare.unpickler"
        # A configuration file is loaded by its path, never looked up by a name; commands, and modules that have moved,
        # are in tables.
        by_name = calls(tree) & {"importlib.import_module", "__import__", "eval", "exec"}
        assert not by_name or name in ("lit_het.moved", "lit_het.cli.main"), name


def test_a_violation_would_be_seen():
    """The checks above read this tree as they should."""
    MODULES["lit_het.heads.example"] = Path("example.py")
    try:
        program = "from lit_het.towers import vit\ndef f():\n    from ..losses import base\n    import eval.report"
        found = imports("lit_het.heads.example", ast.parse(program))
    finally:
        del MODULES["lit_het.heads.example"]
    assert found == {"lit_het.towers.vit", "lit_het.losses.base", "eval.report"}
    assert {package_of(module) for module in found if module.startswith("lit_het")} == {"towers", "losses"}
    lazy = ast.parse("if TYPE_CHECKING:\n    import a\nclass C:\n    import b\n    def f(self):\n        import c")
    assert imports("lit_het.types", lazy, when_loaded) == {"b"}
    assert package_of("lit_het.cli") == package_of("lit_het.cli.main") == "cli"
    assert package_of("lit_het.clicks") == ""
    methods = ast.parse("class A:\n  @overload\n  def b(self): ...\n  def b(self): pass\n  def _c(self): pass")
    assert [path for path, _ in public(methods)] == ["A", "A.b"]
