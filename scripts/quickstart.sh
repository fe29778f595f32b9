#!/usr/bin/env bash
# Installs lit-het into .venv and runs the quickstart; arguments go to `lit-het quickstart`.
set -euo pipefail
source "$(dirname "$0")/environment.sh" ""
exec .venv/bin/lit-het quickstart "$@"
