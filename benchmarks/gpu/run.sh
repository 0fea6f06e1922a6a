#!/usr/bin/env bash
# A part of the GPU suite: benchmarks/gpu/run.sh PART [--smoke] [--out DIR] [--minutes 8.5]
# Nothing of ours has to be installed. PYTHON=... takes another interpreter than the project's .venv, if
# there is one, or python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python=python3
[ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
python=${PYTHON:-$python}
"$python" -c "import torch" 2> /dev/null || {
    echo "$python has no torch: PYTHON=... names an interpreter that has it" >&2
    exit 2
}
exec "$python" -m benchmarks.gpu "$@"
