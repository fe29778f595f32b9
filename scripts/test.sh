#!/usr/bin/env bash
# Installs lit-het with its test extra into .venv and runs the whole suite; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh" "[test]"
exec .venv/bin/python -m pytest -n 2 "$@"
