#!/usr/bin/env bash
# Installs lit-het with its test extra into .venv and runs the whole suite; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh" "[test]"
# Programs that earlier versions of the code compiled are never asked for again.
rm -rf .pytest_cache/jax
# Stealing work keeps the tests of a file, and what they share, on one worker for as long as possible.
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
