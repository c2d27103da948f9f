#!/usr/bin/env bash
# Run the short part of the tests on other Pythons of this machine, each in its own virtual environment, at the same time.
#
#   tools/pythons.sh [VENV] [all]
#
# `make test` ran in VENV (.venv): its Python has run all tests, so it is left out. Of the others the lowest and the highest
# are taken, or all. Interpreters are looked for on PATH, in /usr/bin, and in the folder of pyenv, if there is one. They
# share the mongod of VENV. PYTEST_ARGS: further arguments of pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
which=${2:-}
# As in pyproject.toml's classifiers.
versions=(3.11 3.12 3.13)
# Tests of parts that depend on the interpreter: handlers, options and values, asyncio in the worker and the clients,
# threads and processes, and the proxy of the fault tests. Tests of the tests, of figures, documents and sources are left out.
short=(
    tests/unit
    --ignore=tests/unit/demo
    --ignore=tests/unit/cli/test_help.py
    --ignore=tests/unit/house
    tests/parity/test_simple_parity.py
    tests/integration/client/test_transactions.py
    tests/chaos/selftests/test_proxy.py
    tests/integration/kernel/worker/running/test_endings.py
    tests/integration/kernel/operations/test_writes_are_targeted.py
    tests/acceptance/test_starts_in_time_and_by_priority.py
)

# The full version, and the interpreter itself behind a link, a shim or a virtual environment.
identity='import os, sys; print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys._base_executable))'

candidates() {
    local version root
    for version in "${versions[@]}"; do
        type -aP "python$version" || true
        [[ ! -x /usr/bin/python$version ]] || echo "/usr/bin/python$version"
    done
    type -aP python3 || true
    if command -v pyenv >/dev/null && root=$(pyenv root); then
        compgen -G "$root/versions/*/bin/python3" || true
    fi
}

is_supported() { # a version such as 3.11.2
    local version
    for version in "${versions[@]}"; do
        [[ $1 != "$version".* ]] || return 0
    done
    return 1
}

read -r tested _ < <("$venv/bin/python" -c "$identity")
declare -A pythons=()
while read -r candidate; do
    # A shim may have no interpreter behind it.
    found=$("$candidate" -c "$identity" 2>/dev/null) || continue
    read -r version python <<<"$found"
    [[ $version != "$tested" && -z ${pythons[$version]:-} ]] && is_supported "$version" || continue
    pythons[$version]=$python
done < <(candidates)
mapfile -t chosen < <(printf '%s\n' "${!pythons[@]}" | sed '/^$/d' | sort -V)
if [[ $which != all && ${#chosen[@]} -gt 2 ]]; then
    chosen=("${chosen[0]}" "${chosen[-1]}")
fi

run_on() { # a version
    local own=$venv/pythons/$1
    PYTHON=${pythons[$1]} tools/setup.sh test "$own"
    ln -sf "$mongod" "$own/bin/mongod"
    PATH="$PWD/$own/bin:$PATH" "$own/bin/python" -m pytest -q ${PYTEST_ARGS:-} "${short[@]}"
}

mongod=$("$venv/bin/python" -c 'from mtask.local import find_mongod; print(find_mongod())')
declare -A running=()
mkdir -p "$venv/pythons"
for version in "${chosen[@]}"; do
    (set -e; run_on "$version") </dev/null >"$venv/pythons/$version.log" 2>&1 &
    running[$version]=$!
done
failed=()
for version in "${chosen[@]}"; do
    wait "${running[$version]}" || failed+=("$version")
    echo "pythons: the short part of the tests on Python $version"
    cat "$venv/pythons/$version.log"
done
if ((${#failed[@]})); then
    echo "pythons: FAILED on ${failed[*]}" >&2
    exit 1
fi
echo "pythons: passed on $tested ${chosen[*]}"
