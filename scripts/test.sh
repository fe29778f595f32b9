#!/usr/bin/env bash
# Installs lit-het with its test extra into .venv and runs the tests that show that a clone works; with --all, every
# test, those of TensorFlow Text in an environment of their own. Other arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh" "[test]"
# Workers would compile every module anew.
unset PYTHONDONTWRITEBYTECODE
if [ "${1:-}" = --all ]; then
  shift
  selected=()
  # Outside of the clone: an environment of 4 GB is made once.
  export LIT_HET_TF_TEXT_VENV="${LIT_HET_TF_TEXT_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/lit-het/tensorflow-text}"
  (VENV="$LIT_HET_TF_TEXT_VENV" source scripts/environment.sh "[tf-text]" beartype hypothesis pytest)
else
  selected=(-m "not slow")
  # To check the shapes and types of every call takes a fifth of the time.
  export JAXTYPING_DISABLE=1
fi
# Programs that no test asked for in a week. (To keep a limit of the cache's size, JAX would look at every file of it
# whenever it writes one.)
find .pytest_cache/jax -type f -atime +7 -delete 2>/dev/null || true
# Stealing work keeps the tests of a file, and what they share, on one worker for as long as possible.
# Three workers on two cores: tests that start processes wait for them an eighth of the time.
exec .venv/bin/python -m pytest -p tests.costs -n 3 --dist worksteal "${selected[@]}" "$@"
