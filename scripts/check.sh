#!/usr/bin/env bash
# What is known without running the code: format, lint, types and the rules of docs/architecture.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/pyright ] || (source scripts/environment.sh "[test]")
.venv/bin/ruff format --check .
.venv/bin/ruff check .
# Without tests/conftest.py, which loads JAX: these tests only parse.
.venv/bin/python -m pytest --noconftest -p no:cacheprovider tests/test_architecture.py
.venv/bin/pyright --pythonpath .venv/bin/python --threads 2
