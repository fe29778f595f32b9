#!/usr/bin/env bash
# Format, lint, types, the rules of docs/architecture.md, and figures of a few short trainings as they were recorded.
# Types of the tests, which take as long again, are checked with --all, as in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/pyright ] || (source scripts/environment.sh "[test]")
# Of files that are named, pyright reads only these.
typed=(lit_het scripts)
[ "${1:-}" != --all ] || typed=()
.venv/bin/ruff format --check .
.venv/bin/ruff check .
# Without tests/conftest.py, which loads JAX: these tests only parse.
.venv/bin/python -m pytest --noconftest -p no:cacheprovider tests/test_architecture.py
.venv/bin/pyright --pythonpath .venv/bin/python --threads 2 "${typed[@]}"
# Both kinds of tasks, with and without noise; scripts/test.sh --all has every recorded figure.
JAXTYPING_DISABLE=1 .venv/bin/python -m pytest -n 2 tests/frozen/test_figures.py \
  -k "one_device and (softmax or het_xl_delta or sigmoid_classifier or mixup)"
