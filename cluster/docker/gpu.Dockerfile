# The project for NVIDIA GPUs on x86-64, driver 580 or newer:
#   docker build --platform linux/amd64 --file cluster/docker/gpu.Dockerfile --tag NAME:0.1.0 .
# This compiles flash-attn, which needs no GPU, but about an hour and 9 GB of memory for each of MAX_JOBS.
# A tag may get another image. For builds that repeat, give the bases by their digests, as `docker buildx imagetools
# inspect NAME:TAG` shows them: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu22.04
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM --platform=linux/amd64 ${CUDA_IMAGE} AS cuda

FROM --platform=linux/amd64 ${PYTHON_IMAGE} AS base
# g++: Triton and DeepSpeed compile kernels at run time.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bash g++ make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/pos2distill

# The settings of uv, without which it would install packages that the lock leaves out. Only them, so that another
# change of pyproject.toml does not build everything again.
FROM base AS settings
COPY pyproject.toml ./
RUN sed -n '/^\[tool\.uv\]/,/^\[tool\.hatch/{/^\[tool\.hatch/!p}' pyproject.toml > uv_settings.toml

FROM base AS build
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ARG MAX_JOBS=2
# 80: A100, L4 and others of compute capability 8; 90: H100, H200. For Blackwell, add 100 or 120.
ARG FLASH_ATTN_CUDA_ARCHS=80;90
ENV CUDA_HOME=/usr/local/cuda UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 MAX_JOBS=${MAX_JOBS} \
    FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS}
COPY Makefile ./
COPY --from=settings /opt/pos2distill/uv_settings.toml ./pyproject.toml
COPY requirements ./requirements
RUN make install-gpu
# Into layers of their own, which are pulled at the same time and change less often than the other packages.
RUN mkdir /layers && mv .venv/lib/python3.11/site-packages/nvidia .venv/lib/python3.11/site-packages/torch /layers/

# Without the CUDA toolkit: the packages contain the CUDA libraries, and the machine provides the driver.
FROM base
# The PATH is also in the profile, because a login shell resets it.
# NVIDIA_VISIBLE_DEVICES is left to the device plugin and to `docker run --gpus`: `all` would give every GPU of a machine
# to pods that request none.
ENV PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64
ENV PATH=/opt/pos2distill/.venv/bin:$PATH
RUN echo 'PATH=/opt/pos2distill/.venv/bin:$PATH' > /etc/profile.d/pos2distill.sh \
 && useradd --uid 1000 --create-home ray
# In the order in which they change, the most stable first.
COPY --from=build /layers/nvidia ./.venv/lib/python3.11/site-packages/nvidia
COPY --from=build /layers/torch ./.venv/lib/python3.11/site-packages/torch
COPY --from=build /opt/pos2distill/.venv ./.venv
COPY examples ./examples
COPY run.py pyproject.toml ./
COPY cluster ./cluster
COPY pipelines ./pipelines
COPY pos2distill ./pos2distill
# The copies have the modes of the machine that builds, which may hide them from others.
RUN chmod --recursive go+rX examples run.py pyproject.toml cluster pipelines pos2distill
USER 1000
