#!/usr/bin/env bash
# Make or renew the environment that builds the documentation site: tools/venv_docs.sh [FOLDER]
#
# FOLDER is .venv-docs unless given. requirements/docs.txt has the pins; PyTorch is not among them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/venv.sh "${1:-.venv-docs}" requirements/docs.txt
