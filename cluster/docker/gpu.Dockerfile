# The project for NVIDIA GPUs: docker build --file cluster/docker/gpu.Dockerfile --tag NAME:0.1.0 .
# This compiles flash-attn, which needs no GPU, but about an hour and 6 GB of memory for each of MAX_JOBS.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu22.04 AS cuda

FROM python:3.11-slim-bookworm AS base
# g++: Triton and DeepSpeed compile kernels at run time. wget: KubeRay uses it for health checks.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bash g++ make wget \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/pos2distill

FROM base AS build
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ARG MAX_JOBS=4
ENV CUDA_HOME=/usr/local/cuda UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 MAX_JOBS=${MAX_JOBS}
COPY Makefile ./
COPY requirements ./requirements
RUN make install-gpu

# Without the CUDA toolkit: the packages contain the CUDA libraries, and the machine provides the driver.
FROM base
ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64
COPY --from=build /opt/pos2distill/.venv ./.venv
COPY run.py pyproject.toml ./
COPY pos2distill ./pos2distill
COPY pipelines ./pipelines
COPY cluster ./cluster
COPY examples ./examples

# Also in the profile, because a login shell resets PATH.
ENV PATH=/opt/pos2distill/.venv/bin:$PATH
RUN echo 'PATH=/opt/pos2distill/.venv/bin:$PATH' > /etc/profile.d/pos2distill.sh \
 && useradd --uid 1000 --create-home ray
USER 1000
