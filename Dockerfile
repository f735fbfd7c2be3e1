# An image with HyperParallel; BASE chooses the machine. None of the three has been built yet: the project's tests have no
# Docker. BASE needs Python 3.11 or newer, or apt with such a Python.
#
#   docker build -t hyper-parallel .                                                             # CPU
#   docker build -t hyper-parallel --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .     # NVIDIA
#   docker build -t hyper-parallel --build-arg BASE=ascendai/cann:TAG --build-arg EXTRA=torch_npu .   # Ascend, TAG with py3.11
#
# PyTorch comes from the package index that pip is configured with; TORCH_INDEX names another one, such as that of PyTorch's
# builds for CPUs. On Ascend, torch_npu must be of PyTorch's version, CANN's variables must be set (its set_env.sh), and the
# image must fit the machine's driver.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
ARG EXTRA=""
ARG TORCH_INDEX=""
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Images of CUDA have no Python; those of CANN bring one.
RUN python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/hyper-parallel
ENV PATH=/opt/hyper-parallel/bin:$PATH

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY requirements/lock.txt ./requirements/lock.txt
RUN if [ -n "$TORCH_INDEX" ]; then pip install -c requirements/lock.txt --index-url "$TORCH_INDEX" torch; fi \
    && pip install -c requirements/lock.txt . $EXTRA

# Runs write below the working directory; a run needs no root.
RUN useradd --create-home runner && mkdir /work && chown runner /work
COPY --chown=runner examples /work/examples
USER runner
WORKDIR /work
ENTRYPOINT ["hyper-parallel"]
CMD ["--help"]
