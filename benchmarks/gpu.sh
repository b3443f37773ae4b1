#!/usr/bin/env bash
# Run every benchmark that supports --device cuda on one GPU, each for at most LIMIT seconds (default 400; train_step takes
# more than 170 on an H200), the short ones first. One that fails or takes longer is named, and the others run. From the
# root of the repository: benchmarks/gpu.sh [folder with TRL 1.16]
set -u
PYTHON=${PYTHON:-.venv/bin/python}
with_trl=(${1:+--trl "$1"})
failed=0

measure() {
  timeout "${LIMIT:-400}" "$PYTHON" -m "benchmarks.$@" || { echo "failed or stopped: $1" >&2; failed=1; }
}

measure precision.precision --device cuda "${with_trl[@]}"
measure teacher.teacher --device cuda
measure train_step.train_step --device cuda "${with_trl[@]}"
measure growth.growth --device cuda
measure train_step.changes --device cuda --repetitions 3
measure sampler.sampler --device cuda --rounds 1
exit $failed
