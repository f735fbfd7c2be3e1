#!/usr/bin/env bash
# Make or renew the environment in which groups of Ray actors are tested: tools/venv_ray.sh [FOLDER]
#
# FOLDER is .venv-ray unless given. It holds the pins of requirements/lock.txt and those of requirements/ray.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
cat requirements/ray.txt requirements/lock.txt >"$pins"
tools/venv.sh "${1:-.venv-ray}" "$pins"
