#!/usr/bin/env bash
# A part of the GPU suite: benchmarks/gpu/run.sh PART [--smoke] [--out DIR] [--minutes 8.5]
# Nothing of ours has to be installed. PYTHON=... takes another interpreter than python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m gpu "$@"
