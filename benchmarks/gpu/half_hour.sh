#!/usr/bin/env bash
# Half an hour of a GPU, phase by phase: benchmarks/gpu/half_hour.sh PHASE [--smoke]
#
#     pack        on a machine with network: what is carried, into CARRIED (CIFAR=... has data_batch_1)
#     arrive accuracy_1 accuracy_2 speed peers rest      there, in this order, each within 10 minutes
#
# A phase that was cut short goes on where it stopped: run it again. STATE (runs/half_hour) keeps what is
# done, CARRIED (runs/carried) holds the archives and wheels, and all JSON, tables and logs are copied to OUT.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=python3
[ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
export PYTHON=${PYTHON:-$python}
exec "$PYTHON" -m gpu.half_hour "$@"
