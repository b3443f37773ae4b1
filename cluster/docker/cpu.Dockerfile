# The project for CPUs on x86-64, to try a cluster:
#   docker build --platform linux/amd64 --file cluster/docker/cpu.Dockerfile --tag NAME:0.1.0 .
# A tag may get another image. For builds that repeat, give the base by its digest, as `docker buildx imagetools inspect
# python:3.11-slim-bookworm` shows it: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM --platform=linux/amd64 ${PYTHON_IMAGE}

# g++: DeepSpeed compiles its communication operator when training starts.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bash g++ make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/pos2distill
# The PATH is also in the profile, because a login shell resets it.
ENV UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
ENV PATH=/opt/pos2distill/.venv/bin:$PATH
RUN echo 'PATH=/opt/pos2distill/.venv/bin:$PATH' > /etc/profile.d/pos2distill.sh \
 && useradd --uid 1000 --create-home ray
COPY Makefile ./
COPY requirements ./requirements
RUN make install

# In the order in which they change, the most stable first.
COPY examples ./examples
COPY run.py pyproject.toml ./
COPY cluster ./cluster
COPY pipelines ./pipelines
COPY pos2distill ./pos2distill
# The copies have the modes of the machine that builds, which may hide them from others.
RUN chmod --recursive go+rX examples run.py pyproject.toml cluster pipelines pos2distill
USER 1000
