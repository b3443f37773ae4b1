#!/usr/bin/env bash
# Every benchmark that takes --device cuda, on one GPU; together under nine minutes on an H200. From the repository's
# root: benchmarks/gpu.sh [folder with TRL 1.16]
set -euo pipefail
PYTHON=${PYTHON:-.venv/bin/python}

"$PYTHON" -m benchmarks.train_step.train_step --device cuda ${1:+--trl "$1"}
"$PYTHON" -m benchmarks.growth.growth --device cuda
