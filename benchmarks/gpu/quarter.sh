#!/usr/bin/env bash
# Spends a quarter of an hour of a GPU, on a machine without network that is lent for 900 seconds.
#
# Before, here, on a machine with network (the wheels that the lent machine lacks, 8 MB):
#
#     benchmarks/gpu/wheels.sh few runs/carried
#
# There, from the root of the checkout, with runs/carried carried along and COMMIT set, because the
# history of the checkout does not travel. Whatever is written goes into $OUT/all.tar.gz:
#
#     COMMIT=... benchmarks/gpu/quarter.sh          600 s: the canaries, the other tests, then numbers
#     COMMIT=... benchmarks/gpu/quarter.sh again    130 s: what failed, with long tracebacks; if nothing
#                                                   did, one cell of a fleet and one of sharing
#     COMMIT=... benchmarks/gpu/quarter.sh whole    120 s: 6B trained whole within 16 GiB, one step
#
# `again` and `whole` are called while the machine is still held. On a fresh machine, `again` needs
# what the first call wrote: unpack all.tar.gz into runs/quarter and carry that along, too.
#
# Each part has a second of the script by which it must be over. A part that takes longer is ended,
# and the next one begins. All is packed after each part, and when the script is ended.
#
# A rehearsal takes tiny sizes, few tests, and ten times the seconds. Without a GPU it takes the fake:
#
#     .venv/bin/python tests/fakecuda/on_gpu.py benchmarks/gpu/quarter.sh [again|whole] --smoke
set -uo pipefail
set -m  # each part is a process group of its own, which is ended as a whole
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit
lists=benchmarks/gpu
state=${STATE:-$root/runs/quarter}
out=${OUT:-$state/out}
python=python3
[ -x .venv/bin/python ] && python=$root/.venv/bin/python
python=${PYTHON:-$python}
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
smoke=false times=1 workers=8 patience=100
LOG_BYTES=2000000  # what is kept of a log is its end: a file that comes back has at most 16 MiB
GRACE=5            # seconds from the interrupt of a part that is over its time to its kill

# ---- parts ------------------------------------------------------------------------------------------

pack() {
  mkdir -p "$out"
  tar --exclude='*.work' --exclude=./out -czf "$out/all.tar.gz.part" -C "$state" . &&
    mv "$out/all.tar.gz.part" "$out/all.tar.gz"
}

# part NAME SECOND COMMAND...: runs it until that second of this script, and returns its status.
part() {
  local name=$1 left=$(($2 * times - SECONDS - GRACE)) begin=$SECONDS running status log=$state/$1.log
  shift 2
  if ((left <= 0)); then
    note "$name" "not begun: no time is left" 0
    return 1
  fi
  "$@" > "$log" 2>&1 &
  running=$!
  (
    sleep "$left"
    kill -INT -- -$running
    sleep $GRACE
    kill -KILL -- -$running
  ) > /dev/null 2>&1 &
  wait $running 2> /dev/null
  status=$?
  ((SECONDS - begin < left)) || status=124
  stop
  tail -c $LOG_BYTES "$log" > "$log.end" && mv "$log.end" "$log"
  note "$name" "$(said $status)" $((SECONDS - begin))
  tail -n 4 "$log" | cut -c1-300
  pack
  return $status
}

# Ends whatever the part has begun, also what outlives it, and what watches over its time.
stop() {
  local group
  for group in ${running:-} $(jobs -p); do kill -KILL -- "-$group"; done
  wait
} 2> /dev/null

said() {
  case $1 in
    0) echo "good" ;;
    124) echo "ended: it was over its time" ;;
    *) echo "failed with status $1" ;;
  esac
}

note() {
  printf '%s\t%s\t%s s\n' "$@" | tee -a "$state/parts.tsv"
}

# Ends the script by a signal. What was written so far is packed.
end() {
  trap '' TERM INT HUP
  stop
  note "the script" "ended by a signal" $SECONDS
  pack
  exit 143
}

# ---- what a part runs --------------------------------------------------------------------------------

arrive() {
  echo "commit ${COMMIT:-$(git rev-parse HEAD)}"
  nvidia-smi 2> /dev/null || echo "there is no nvidia-smi"
  [ -e runs/carried/few/install.sh ] && PYTHON=$python bash runs/carried/few/install.sh
  # The pixel kernels; the allocator is compiled meanwhile, once, and kept in the user's cache.
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --editable . &
  "$python" -c 'import torch
from offload.memory.cuda_shim import why_not_on
for device in ("cpu", "cuda"):
    print(device, "allocator:", why_not_on(torch.device(device)) or "compiled")'
  wait
  "$python" -c 'from loaders.pixels.kernels import compiled; print("pixel kernels:", compiled())'
}

# named LIST: the test ids in it, a line each.
named() {
  grep -v -e '^#' -e '^$' "$lists/$1"
}

# tests WORKERS ARGUMENT...: each test is a line of the log as soon as it is over.
tests() {
  local workers=$1
  shift
  "$python" -m pytest -v -n "$workers" --dist worksteal -p no:cacheprovider -m gpu \
    -o timeout=$patience "$@"
}

canaries() {
  mapfile -t ids < <(named canaries.txt)
  tests "$workers" --tb=long --showlocals "${ids[@]}"
}

# The others, without those that look into compiled kernels, which take minutes.
others() {
  local id without=(--deselect tests/integration/test_sanitizer_gpu.py)
  mapfile -t ids < <(named canaries.txt; named alone.txt)
  for id in "${ids[@]}"; do without+=(--deselect "$id"); done
  local files=(tests)
  $smoke && files=(tests/unit/test_color.py tests/integration/test_streams_faults.py)
  tests "$workers" --tb=short "${without[@]}" "${files[@]}"
}

alone() {
  mapfile -t ids < <(named alone.txt)
  tests 1 --tb=long "${ids[@]}"
}

# failed: the ids of the tests of the first call that failed.
failed() {
  sed -nE 's/^\[gw[0-9]+\] \[ *[0-9]+%\] (FAILED|ERROR) (.*[^ ]) *$/\2/p' \
    "$state"/{canaries,tests,alone}.log 2> /dev/null | sort -u
}

failures() {
  mapfile -t ids < <(failed)
  tests 4 --tb=long --showlocals "${ids[@]}"
}

# measure NAME RUN CELL...: these cells of the GPU suite, one process, into STATE/gpu_NAME.jsonl.
measure() {
  local name=$1 run=$2 cells
  shift 2
  cells=$(printf '"%s",' "$@")
  printf '{"job": {"run": "%s", "cells": [%s], "arguments": {}, "device": "cuda", "smoke": %s,
    "work": "%s"}, "store": ["%s", "gpu_%s"]}' \
    "$run" "${cells%,}" $smoke "$state/$name.work" "$state" "$name" |
    "$python" -m gpu.child "$(device)" && cut -c1-200 "$state/gpu_$name.jsonl"
}

device() {
  nvidia-smi --query-gpu=name --format=csv,noheader --id=0 2> /dev/null || echo "fake GPU"
}

ceilings() {
  local rates=(
    "h2d" "d2h" "h2d while d2h" "d2h while h2d" "h2d of 4 KiB" "d2h of 4 KiB" "within"
    "gemm float32" "gemm tf32" "gemm bfloat16" "memory" "launch" "host, 1 worker"
    "host, all workers" "costs"
  )
  measure ceilings gpu.ceilings:rates "${rates[@]}" || return
  measure ceilings gpu.ceilings:others "event record" "event query" "stream wait" "stream switch" \
    "h2d pageable" "adam in one call" "shim"
}

lora() {
  local name="llama-7b lora 8x1K" budget=8GiB
  $smoke && name="llama lora" budget=minimum
  measure speed gpu.speed:measure "$name; none; cuda" "$name; none; cudagraph" \
    "$name; $budget; cuda" "$name; $budget; cudagraph"
}

peaks() {
  measure peaks gpu.peaks:watch "gpt2-small; cudagraph; 100 %" "gpt2-small; cudagraph; 60 %" \
    "gpt2-small; cudagraph; minimum"
}

fleet() {
  measure fleet gpu.fleet:rows "host updates; 2 jobs"
}

sharing() {
  local name="gpt2-1.5b full 8x1K"
  $smoke && name="llama lora"
  measure sharing gpu.sharing:rows "$name; ours, cudagraph"
}

whole() {
  local cell="full 6B 1x1K; 16 GiB; ours, cuda"
  $smoke && cell="full tiny; none; ours, cuda"
  measure peers gpu.peers.measure:largest "$cell"
}

# ---- calls ------------------------------------------------------------------------------------------

first() {
  rm -rf "$state"
  mkdir -p "$state"
  part arrive 25 arrive
  if ! part canaries 70 canaries; then
    echo "a canary failed: nothing is measured"
    part tests 545 others
    part alone 585 alone
    return 1
  fi
  part tests 255 others
  part alone 290 alone
  part ceilings 350 ceilings
  part lora 510 lora
  part peaks 585 peaks
}

again() {
  if [ -n "$(failed)" ]; then
    part failures 125 failures
  else
    part fleet 75 fleet
    part sharing 125 sharing
  fi
}

main() {
  local call=first word
  for word in "$@"; do
    case $word in
      --smoke) smoke=true times=10 workers=2 patience=600 ;;
      again | whole) call=$word ;;
      *)
        echo "quarter.sh: $word is no call: again, whole or none of them, and --smoke" >&2
        exit 2
        ;;
    esac
  done
  trap end TERM INT HUP
  mkdir -p "$state"
  if [ $call = whole ]; then part whole 115 whole; else $call; fi
  echo
  cat "$state/parts.tsv"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@"
