"""Wrong arguments and paths are reported before anything heavy is imported."""

import json
import subprocess
import sys

import pytest

HEAVY = {"jax", "flax", "numpy", "matplotlib", "grain", "orbax", "optax", "scipy", "tyro", "safetensors"}
MISSING_PATHS = {
    "train --config nowhere.py": "no configuration file nowhere.py",
    "train --config nowhere.json": "nowhere.json is missing",
    "plan --config nowhere.py:a=b --devices 2": "no configuration file nowhere.py",
    "embed --tower nowhere --output there": "nowhere/config.json is missing",
    "embed --tower quickstart_upstream.py --output there": "no configuration file quickstart_upstream.py",
    "checkpoint list nowhere": "no checkpoints in nowhere",
    "zero-shot --checkpoint . --data nowhere": "no folder nowhere",
    "zero-shot --checkpoint nowhere --data x=.": "nowhere/config.json is missing",
    "evaluate --checkpoint nowhere": "nowhere/config.json is missing",
    "evaluate --checkpoint . --config nowhere": "shipped one: glyph_evaluations",
    "report nowhere": "nowhere is not a run",
    "compare . --against nowhere": "nowhere is not a run",
    "classify nowhere.png --checkpoint . --labels a,b": "nowhere.png: cannot be read",
    "classify - --checkpoint nowhere --labels a,b": "nowhere/config.json is missing",
    "demo --checkpoint . --captions nowhere.txt": "nowhere.txt: cannot be read",
    "data index nowhere.tar": "nowhere.tar: no tar file matches",
    "data prepare pets nowhere there": "nowhere: cannot be read",
    "import --from nowhere.npz:img --to there": "nowhere.npz does not exist",
    "export --checkpoint nowhere --to npz --output there": "nowhere/config.json is missing",
}
HELP = ("--help", "train --help", "zero-shot --help", "embed --help", "data --help")
WRONG_FLAGS = {
    "train --config quickstart_lit_het_xl --no-such-flag 1": "unknown flag --no-such-flag",
    "train --config quickstart_lit_het_xl --length much": "length",
    "train --config quickstart_lit_het_xl --seed -1": "--seed -1 must",
    "embed --tower mine.py --output there --no-such-flag 1": "unknown flag --no-such-flag",
    "few-shot --checkpoint run --data . --no-such-flag 1": "'lit-het few-shot --data DIR --help' lists all flags",
}
# What is imported stays: of a command that imports something heavy, so do all that follow.
REPORT = f"""
import contextlib, io, json, os, sys
from lit_het.cli.main import main
found = {{}}
for folder, command in json.load(sys.stdin):
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            code = main(command.split())
        except SystemExit as ended:  # --help
            code = ended.code
    found[command] = code, told.getvalue(), shown.getvalue(), sorted(sys.modules.keys() & {HEAVY})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Code, both outputs and imports of each command: in one process, as JAX alone takes a second to import."""
    empty, folder = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("flags")
    (folder / "run").mkdir()
    (folder / "run" / "config.json").touch()
    (folder / "mine.py").write_text("from lit_het.configs.quickstart_lit_het_xl import get_config\n")
    places = [(str(empty), command) for command in (*HELP, *MISSING_PATHS)]
    commands = json.dumps(places + [(str(folder), command) for command in WRONG_FLAGS])
    ended = subprocess.run([sys.executable, "-c", REPORT], input=commands, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("command", MISSING_PATHS)
def test_a_missing_path_is_one_line_and_imports_nothing_heavy(told, command):
    code, message, shown, imported = told[command]
    [line] = message.splitlines()
    assert line.startswith("lit-het: ")
    assert MISSING_PATHS[command] in line
    assert (code, shown, imported) == (1, "", [])


@pytest.mark.parametrize("command", HELP)
def test_help_imports_nothing_heavy(told, command):
    code, message, shown, imported = told[command]
    assert (code, imported) == (0, []), message
    assert shown.startswith("usage: lit-het")


@pytest.mark.parametrize("command", WRONG_FLAGS)
def test_a_wrong_flag_is_reported_before_data_or_checkpoints_can_be_read(told, command):
    code, message, _, imported = told[command]
    assert code == 1
    assert WRONG_FLAGS[command] in message
    # The configuration's own classes stand beside the towers and heads, which need JAX.
    assert not {"grain", "orbax", "matplotlib", "safetensors"} & set(imported)
