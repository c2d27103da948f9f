#!/usr/bin/env bash
# Run the tests of mtask.contrib.django on the Djangos that the suite does not have: 6.0 and 6.1 need Python 3.12.
#
#   tools/django.sh [VENV]
#
# The suite runs them in VENV (.venv), with the Django that its Python can have. PYTHON names an interpreter from 3.12 on.
# Each Django has a virtual environment below VENV/django, and all share the mongod of VENV.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
versions=(6.0 6.1)

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "django: Django 6 needs Python 3.12 or later; name one: make django PYTHON=/path/to/python3.12" >&2
    exit 1
}

python=$(find_python)
mongod=$("$venv/bin/python" -c 'from mtask.local import find_mongod; print(find_mongod())')
for version in "${versions[@]}"; do
    own=$venv/django/$version
    PYTHON=$python tools/setup.sh test "$own"
    "$own/bin/python" -m pip install --quiet "django~=$version.0" "django-mongodb-backend~=$version.0" httpx
    ln -sf "$mongod" "$own/bin/mongod"
    echo "django: the tests on Django $version"
    PATH="$PWD/$own/bin:$PATH" "$own/bin/python" -m pytest -q ${PYTEST_ARGS:-} tests/integration/contrib/django
done
echo "django: passed on ${versions[*]}"
