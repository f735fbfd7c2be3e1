#!/usr/bin/env bash
# Make or renew an environment of requirements/lock.txt with other pins: tools/venv_with.sh FOLDER [PINS]
#
# What PINS names takes the place of the lock file's version, or is added. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?the folder of the environment}
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
names=$(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' "${2:-/dev/null}" | paste -sd '|' -)
cat ${2:+"$2"} >"$pins"
grep -vE "^(${names:-none})==" requirements/lock.txt >>"$pins"
tools/venv.sh "$venv" "$pins"
