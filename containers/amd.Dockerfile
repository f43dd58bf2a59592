# stepmark for AMD GPUs. Build it in the root of the source tree:
#
#   docker build -f containers/amd.Dockerfile -t stepmark:amd .
#
# The default base has torch 2.11 and ROCm 7.14, in a virtual environment of its own.
ARG BASE=rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.11.0
FROM ${BASE}

WORKDIR /opt/stepmark-source
COPY LICENSE README.md pyproject.toml requirements.lock ./
COPY containers/install.sh containers/
COPY src src/
COPY examples examples/
# The interpreter of the base that has torch.
ARG PYTHON=python3
RUN PIP_NO_CACHE_DIR=1 containers/install.sh rocm /opt/stepmark

# Runs record this commit, and `stepmark resume` compares it.
ARG COMMIT=
ENV STEPMARK_COMMIT=${COMMIT} PATH=/opt/stepmark/bin:${PATH}
WORKDIR /workspace
