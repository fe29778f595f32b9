"""Commands, flags, exit codes, configurations, parameters and imports are those that were recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from lit_het.paths import locate_config
from tests.frozen import configurations, exit_codes, files, flags, imports, parameters
from tests.frozen.command_line import Offer
from tests.frozen.files import compare

FLAGS, CONFIGURATIONS, PARAMETERS = (files.read(name) for name in ("flags", "configurations", "parameters"))


def test_commands_have_the_flags_that_were_recorded():
    compare(FLAGS["commands"], flags.commands())


@pytest.mark.parametrize("kind", flags.EVALUATIONS)
def test_evaluations_have_the_flags_that_were_recorded(kind):
    compare(FLAGS["evaluations"][kind], flags.fields(Offer(kind, "--data", "set")))


@pytest.mark.parametrize("task", flags.TASKS)
def test_fields_and_alternatives_have_the_flags_that_were_recorded(task):
    compare(FLAGS["configurations"][task], flags.of_task(task))


def test_all_commands_of_a_configuration_take_its_fields():
    name = flags.TASKS[0]
    file = str(locate_config(Path(name)))
    for command in (
        ("plan", "--config", name),
        ("tune", "--config", name),
        ("embed", "--tower", file, "--output", "."),
    ):
        compare(FLAGS["configurations"][name][""], flags.fields(Offer(*command)))


def test_commands_end_with_the_codes_that_were_recorded():
    compare(files.read("exit_codes"), exit_codes.recorded())


def test_a_process_ends_with_the_code_of_its_command():
    process = subprocess.run([sys.executable, "-m", "lit_het", "report", "none"], capture_output=True)
    assert process.returncode == files.read("exit_codes")["report none"] == 1


def test_shipped_configurations_are_those_that_were_recorded():
    compare(CONFIGURATIONS, configurations.recorded())
    assert CONFIGURATIONS["configurations"].keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", CONFIGURATIONS["configurations"])
def test_a_config_json_that_was_recorded_can_be_read(name, tmp_path):
    content = CONFIGURATIONS["configurations"][name]
    compare(content, configurations.read(content, tmp_path))


@pytest.mark.parametrize("name", CONFIGURATIONS["evaluations"])
def test_evaluations_of_a_config_json_that_were_recorded_can_be_read(name, tmp_path):
    content = CONFIGURATIONS["configurations"]["quickstart_upstream"]
    content = content | {"evaluations": CONFIGURATIONS["evaluations"][name]}
    compare(content, configurations.read(content, tmp_path))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_configuration_has_the_parameters_that_were_recorded(name):
    compare(PARAMETERS[name]["parameters"], parameters.of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARAMETERS if PARAMETERS[name]["changes"]])
def test_arguments_and_flags_change_the_parameters_that_were_recorded(name):
    compare(PARAMETERS[name]["changes"], parameters.changed(name))


def test_what_documents_projects_and_configurations_import_is_there():
    for of_source in imports.recorded().values():
        for module, names in of_source.items():
            exec(f"from {module} import {', '.join(names)}" if names else f"import {module}", {})
