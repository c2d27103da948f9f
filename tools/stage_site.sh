#!/usr/bin/env bash
# Gather the sources of the site in build/site-source, with the same paths as in the repository.
#
#   tools/stage_site.sh [VENV]
#
# VENV (.venv) holds the Mermaid that `tools/setup.sh docs` fetched.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
source=build/site-source
rm -rf "$source"
mkdir -p "$source/assets"
cp README.md CHANGELOG.md CONTRIBUTING.md LICENSE docker-compose.yml "$source"
tar -c --exclude=node_modules --exclude=__pycache__ docs examples tests/chaos/README.md | tar -x -C "$source"
cp "$venv/share/mermaid/mermaid.min.js" "$source/assets"
