#!/usr/bin/env bash
# Builds the documents as a site in build/site, or in the folder given; fails at dead links and at pages that load
# anything from other machines.
set -euo pipefail
site="$(realpath -m "${1:-build/site}")"
source "$(dirname "$0")/environment.sh" "[docs]"
# All pages are read anew: Sphinx keeps silent about those that have not changed.
.venv/bin/python -m sphinx -W --keep-going --nitpicky --fresh-env -q -c docs . "$site"
rm -r "$site/.doctrees"
if grep -rE --include='*.html' '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' "$site"; then
  echo "these pages load something from other machines" >&2
  exit 1
fi
echo "$site/index.html"
