#!/usr/bin/env bash
# Run every benchmark that supports --device cuda on one GPU. Sized for less than nine minutes on an H200; not yet run on
# one. From the root of the repository: benchmarks/gpu.sh [folder with TRL 1.16]
set -euo pipefail
PYTHON=${PYTHON:-.venv/bin/python}

"$PYTHON" -m benchmarks.train_step.train_step --device cuda ${1:+--trl "$1"}
"$PYTHON" -m benchmarks.train_step.changes --device cuda --repetitions 3
"$PYTHON" -m benchmarks.precision.precision --device cuda ${1:+--trl "$1"}
"$PYTHON" -m benchmarks.growth.growth --device cuda
"$PYTHON" -m benchmarks.teacher.teacher --device cuda
"$PYTHON" -m benchmarks.sampler.sampler --device cuda --rounds 1
