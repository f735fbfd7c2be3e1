#!/usr/bin/env bash
# Build the wheel into dist/ and try it in an empty environment: tools/wheel.sh [FOLDER]
#
# FOLDER is the environment whose pip and setuptools build it, .venv unless given. The wheel is then installed with all that it
# needs (at the versions of requirements/lock.txt) into a new environment, and its commands run from an empty folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=$(cd "${1:-.venv}" && pwd)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

rm -rf build dist/hyper_parallel-*.whl
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
wheel=$(echo "$root"/dist/hyper_parallel-*.whl)
echo "built $wheel; installing it into an empty environment (minutes)"

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet -c requirements/lock.txt "$wheel"
mkdir "$place/empty"
cd "$place/empty"
command=$place/venv/bin/hyper-parallel
"$command" --help >/dev/null
"$command" schema | "$place/venv/bin/python" -m json.tool >/dev/null
"$command" plan --model llama-3-8b --cluster h100x8 --batch 64 --sequence 4096 --top 1 >/dev/null
[ -z "$(ls -A)" ] || { echo "a command left files in the folder that it ran in: $(ls -A)"; exit 1; }
"$command" examples >/dev/null
"$command" inspect examples/quickstart.yaml >/dev/null
echo "$("$command" --version) runs from an empty folder: --help, schema, plan, examples and inspect"
