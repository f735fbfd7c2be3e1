#!/usr/bin/env bash
# Build the wheel into a folder: tools/build_wheel.sh PYTHON FOLDER
#
# PYTHON is an interpreter with pip and setuptools. The wheel is built from a copy of the sources, whose README has the
# links that a package index needs (tools/package_readme.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
out=$2

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R pyproject.toml setup.py MANIFEST.in LICENSE examples "$copy"
cp -R src "$copy/src"
rm -rf "$copy"/src/*.egg-info
find "$copy" -name __pycache__ -type d -prune -exec rm -rf {} +
"$python" tools/package_readme.py >"$copy/README.md"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$out" "$copy"
