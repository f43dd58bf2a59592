# stepmark for NVIDIA GPUs. Build it in the root of the source tree:
#
#   docker build -f containers/nvidia.Dockerfile -t stepmark:nvidia .
#
# The default base has torch 2.11, CUDA 13.2 and NCCL 2.29.7.
ARG BASE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE}

WORKDIR /opt/stepmark-source
COPY LICENSE README.md pyproject.toml requirements.lock ./
COPY containers/install.sh containers/
COPY src src/
COPY examples examples/
# The interpreter of the base that has torch.
ARG PYTHON=python3
RUN PIP_NO_CACHE_DIR=1 containers/install.sh cuda /opt/stepmark

# Runs record this commit, and `stepmark resume` compares it.
ARG COMMIT=
ENV STEPMARK_COMMIT=${COMMIT} PATH=/opt/stepmark/bin:${PATH}
WORKDIR /workspace
