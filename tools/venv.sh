#!/usr/bin/env bash
# Make or renew a virtual environment: tools/venv.sh [FOLDER [PINS]]   (default .venv requirements/lock.txt)
#
# Does nothing when the environment already holds what PINS and pyproject.toml ask for. What stands in PINS below a
# line that begins with "# --no-deps" is installed without what it asks for. PYTHON chooses the interpreter; without
# it, what an existing environment was made with, else the first on the path that is new enough.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}
pins=${2:-requirements/lock.txt}

fail() {
    echo "hyper-parallel: $*" >&2
    exit 2
}

version_of() { # the version, or nothing for what does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && { echo "$PYTHON"; return; }
        found=$(version_of "$PYTHON")
        fail "needs Python 3.11 or newer, but PYTHON=$PYTHON is ${found:-not a Python that runs}"
    fi
    seen=
    for candidate in "$venv/bin/python" python3 python3.13 python3.12 python3.11; do
        new_enough "$candidate" && { echo "$candidate"; return; }
        [ -n "$seen" ] || seen=$(version_of "$candidate")
    done
    fail "needs Python 3.11 or newer${seen:+, but python3 is $seen}; install one, or name it: PYTHON=/path/to/python3.12 make ..."
}

python=$(choose_python)
version=$(version_of "$python")
wanted="$version $(cat "$pins" pyproject.toml src/hyper_parallel/_version.py | cksum)"
stamp="$venv/.hyper-parallel"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
    exit 0
fi
if [ "$(version_of "$venv/bin/python")" != "$version" ]; then
    echo "Making $venv with Python $version"
    "$python" -m venv --clear "$venv" >/dev/null ||
        fail "cannot make $venv; on Debian and Ubuntu install python3-venv, then try again"
fi
echo "Installing the pinned dependencies into $venv (minutes the first time)"
rm -f "$stamp"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m pip install --quiet)
bare=$(sed -n '/^# --no-deps/,$p' "$pins" | sed '/^#/d;/^$/d')
"${pip[@]}" -r <(sed '/^# --no-deps/,$d' "$pins") && { [ -z "$bare" ] || "${pip[@]}" --no-deps $bare; } ||
    fail "the pinned dependencies could not be installed; see pip's message above, mend it and run make again"
"${pip[@]}" --no-deps --no-build-isolation --editable . ||
    fail "hyper-parallel itself could not be installed; see pip's message above"
echo "$wanted" >"$stamp"
