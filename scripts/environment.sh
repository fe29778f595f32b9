# Sourced by the other scripts: makes .venv and installs the project with the extras in $1, e.g. "[test]", and the
# packages that follow. VENV names another folder for the environment.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}" venv="${VENV:-.venv}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "lit-het needs Python 3.11 or newer; name one with PYTHON=/path/to/python3.11" >&2
  exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
  --editable ".${1:-}" "${@:2}"
