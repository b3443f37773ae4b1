# The project for CPUs, to try a cluster: docker build --file cluster/docker/cpu.Dockerfile --tag NAME:0.1.0 .
FROM python:3.11-slim-bookworm

# g++: DeepSpeed compiles its communication operator when training starts. wget: KubeRay uses it for health checks.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bash g++ make wget \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/pos2distill
ENV UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
COPY Makefile ./
COPY requirements ./requirements
RUN make install

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
