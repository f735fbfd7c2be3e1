#!/usr/bin/env bash
# Make or renew the environment in which LlamaFactory is tested: tools/venv_llamafactory.sh [FOLDER]
#
# FOLDER is .venv-llamafactory unless given. requirements/llamafactory.txt has the pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-llamafactory}
tools/venv.sh "$venv" requirements/llamafactory.txt

# LlamaFactory imports torchaudio, whose libraries are built for CUDA and do not load beside a PyTorch for the CPU.
# Without them torchaudio is plain Python, which is enough for text.
for site in "$venv"/lib/python*/site-packages; do
    [ -e "$site/torch/lib/libtorch_cuda.so" ] || rm -f "$site"/torchaudio/lib/*.so
done
