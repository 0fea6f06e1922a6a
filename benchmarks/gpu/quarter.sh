#!/usr/bin/env bash
# Spends a quarter of an hour of a GPU, on a machine without network that is lent for 900 seconds.
#
# Before, here, on a machine with network, at the commit that is to run:
#
#     benchmarks/gpu/quarter.sh prepare     gathers runs/carried: what the lent machine may lack, 16 MB,
#                                           and what tells there which commit runs
#
# There, from the root of the checkout, with runs/carried carried along. Whatever is written goes into
# $OUT/all.tar.gz:
#
#     bash benchmarks/gpu/quarter.sh          585 s: the canaries, the other tests, then numbers
#     bash benchmarks/gpu/quarter.sh again    125 s: what failed, with long tracebacks; if nothing did,
#                                             a small fleet and a small training that answers requests
#     bash benchmarks/gpu/quarter.sh whole    115 s: 6B trained whole within 16 GiB, one step
#     bash benchmarks/gpu/quarter.sh card      90 s: the rates of the card, as a file for estimates
#
# `again`, `whole` and `card` are called while the machine is still held, so they find what the first call
# wrote. On a fresh machine, unpack all.tar.gz into runs/quarter and carry that along, too.
#
# Each part has a second of the script by which it must be over. A part that takes longer is ended,
# and the next one begins; one that is over early leaves its time to the next. All is packed after
# each part, and when the script is ended.
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
carried=${CARRIED:-$root/runs/carried}
site=$state.site  # the carried wheels, unpacked
out=${OUT:-$state/out}
python=python3
[ -x .venv/bin/python ] && python=$root/.venv/bin/python
python=${PYTHON:-$python}
export PYTHONPATH="$site:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ulimit -c 0
smoke=false times=1 workers=8 patience=100
LOG_BYTES=2000000  # what is kept of a log is its end: a file that comes back has at most 16 MiB
GRACE=5            # seconds from the interrupt of a part that is over its time to its end
TRAVELS=64         # MiB that the checkout and what is carried may have together

# ---- parts ------------------------------------------------------------------------------------------

pack() {
  mkdir -p "$out"
  tar --exclude='*.work' --exclude=./out -czf "$out/all.tar.gz.part" -C "$state" . &&
    mv "$out/all.tar.gz.part" "$out/all.tar.gz"
}

# part NAME SECOND COMMAND...: runs it until that second of this script, and returns its status.
part() {
  local name=$1 left=$(($2 * times - SECONDS - GRACE)) begin=$SECONDS log=$state/$1.log
  local running watcher status
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
    kill -ABRT -- -$running  # a Python that hangs in a call says where
    sleep 1
    kill -KILL -- -$running
  ) > /dev/null 2>&1 &
  watcher=$!
  disown $watcher  # its end is no news
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
  for group in ${running:-} ${watcher:-} $(jobs -p); do kill -KILL -- "-$group"; done
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

# Unpacks the carried wheels that Python lacks to where it looks. The machine's own stays as it is.
unpack() {
  local wheels=("$carried"/few/*.whl)
  rm -rf "$site"
  mkdir -p "$site"
  [ -e "${wheels[0]}" ] || return 0
  "$python" - "$site" "${wheels[@]}" << 'UNPACK'
import importlib.metadata as found
import pathlib
import sys
import zipfile

for wheel in sys.argv[2:]:
    name = pathlib.Path(wheel).name.partition("-")[0]
    try:
        found.version(name)
    except found.PackageNotFoundError:
        print("unpacked:", pathlib.Path(wheel).name)
        zipfile.ZipFile(wheel).extractall(sys.argv[1])
UNPACK
}

# Which commit runs: the one that was prepared, if its files are here as they were.
commit() {
  if [ "${COMMIT:-}" ]; then
    echo "$COMMIT"
  elif [ ! -e "$carried/commit" ]; then
    git rev-parse HEAD 2> /dev/null || echo unknown
  elif sha256sum --check --quiet "$carried/sources" >&2; then
    cat "$carried/commit"
  else
    echo "$(cat "$carried/commit")-changed"
  fi
}

arrive() {
  local device
  echo "commit $(cat "$state/commit")"
  timeout 10 nvidia-smi || echo "nvidia-smi says nothing"
  "$python" -c 'import importlib.metadata as found, sys
print("python", sys.version)
for name in sys.argv[1:]:
    try:
        print(name, found.version(name))
    except found.PackageNotFoundError:
        print(name, "IS NOT INSTALLED")' torch torchvision lightning numpy pydantic shtab cryptography \
    pytest pytest-timeout pytest-xdist hypothesis nvidia-ml-py setuptools
  # All at once: the pixel kernels beside their sources, the allocators into the user's cache.
  "$python" -c 'from setuptools import setup; setup()' --quiet egg_info build_ext --inplace &
  for device in cpu cuda; do
    "$python" -c 'import sys, torch
from offload.memory.cuda_shim import why_not_on
print(sys.argv[1], "allocator:", why_not_on(torch.device(sys.argv[1])) or "compiled")' $device &
  done
  wait
  "$python" -c 'from loaders.pixels.kernels import compiled; print("pixel kernels:", compiled())'
}

# named LIST: the test ids in it, a line each.
named() {
  grep -v -e '^#' -e '^$' "$lists/$1"
}

# tests WORKERS ARGUMENT...: a test that hangs says where after a while.
tests() {
  local workers=$1
  shift
  OUTCOMES=$state OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} "$python" -m pytest -v -n "$workers" \
    --dist worksteal -p no:cacheprovider -p benchmarks.gpu.outcomes -m gpu -o timeout=$patience \
    -o faulthandler_timeout=$((patience / 2)) "$@"
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
  $smoke && files=(tests/unit/test_color.py tests/integration/test_offload_runner_faults.py)
  tests "$workers" --tb=short "${without[@]}" "${files[@]}"
}

alone() {
  mapfile -t ids < <(named alone.txt)
  tests 1 --tb=long "${ids[@]}"
}

# ended OUTCOME: the ids of the tests that did.
ended() {
  sed -n "s/^$1\t//p" "$state/outcomes.tsv" 2> /dev/null
}

# failed: the ids of the tests that failed, and of canaries that did not end.
failed() {
  {
    ended failed
    named canaries.txt | grep -vxF -f <(ended "[a-z]*")
  } | sort -u
}

failures() {
  mapfile -t ids < <(failed)
  tests 4 --tb=long --showlocals "${ids[@]}"
}

# measure NAME RUN CELL...: these cells of the GPU suite, into STATE/gpu_NAME.jsonl. A process runs
# them one after the other. If it fails, another one goes on behind the cell that did not come.
measure() {
  local name=$1 run=$2 rows=$state/gpu_$1.jsonl cell left good=true
  shift 2
  while (($#)); do
    cells "$name" "$run" "$@" && break
    left=()
    for cell; do grep -qF "{\"cell\": \"$cell\"," "$rows" || left+=("$cell"); done
    good=false
    set -- "${left[@]:1}"
  done
  cut -c1-250 "$rows"
  $good && ! grep -q '"row": null' "$rows"
}

cells() {
  local name=$1 run=$2 cells
  shift 2
  cells=$(printf '"%s",' "$@")
  printf '{"job": {"run": "%s", "cells": [%s], "arguments": {"rounds": 1}, "device": "cuda", "smoke": %s,
    "work": "%s"}, "store": ["%s", "gpu_%s"]}' \
    "$run" "${cells%,}" $smoke "$state/$name.work" "$state" "$name" |
    COMMIT=$(cat "$state/commit") "$python" -X faulthandler -m benchmarks.gpu.child "$(device)"
}

device() {
  if [ "${FAKE_CUDA:-}" ]; then
    echo "fake GPU"
  else
    nvidia-smi --query-gpu=name --format=csv,noheader --id=0 || echo "a GPU without nvidia-smi"
  fi
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
  measure fleet gpu.fleet:rows "host updates; 2 small jobs"
}

sharing() {
  local name="gpt2-small full 8x1K"
  $smoke && name="llama lora"
  measure sharing gpu.sharing:rows "$name; ours, cudagraph"
}

whole() {
  local cell="full 6B 1x1K; 16 GiB; ours, cuda"
  $smoke && cell="full tiny; none; ours, cuda"
  measure peers gpu.peers.measure:largest "$cell"
}

card() {
  "$python" -m perfect.card measure --device cuda:0 --out "$state/card.json"
}

# ---- calls ------------------------------------------------------------------------------------------

prepare() {
  local mega
  rm -rf "$carried"
  "$lists/wheels.sh" few "$carried" || return
  git rev-parse HEAD > "$carried/commit" || return
  [ -z "$(git status --porcelain)" ] || sed -i 's/$/-dirty/' "$carried/commit"
  git ls-files -z | xargs -0 sha256sum > "$carried/sources"
  mega=$({
    git ls-files --cached --others --exclude-standard -z
    find "$carried" -type f -print0
  } | du --files0-from=- --apparent-size --total --block-size=1M | tail -n 1 | cut -f1)
  if ((mega >= TRAVELS)); then
    echo "the checkout and $carried have $mega MiB: less than $TRAVELS MiB travel" >&2
    return 1
  fi
  echo "commit $(cat "$carried/commit"), $mega MiB in all. Carry ${carried#"$root"/}, and type there:"
  echo
  echo "    bash benchmarks/gpu/quarter.sh"
}

first() {
  local status
  part arrive 45 arrive
  part canaries 90 canaries
  status=$?
  # That not all of them are over in time is no failure: the first start of a machine is slow.
  if ((status != 0 && status != 124)) || [ "$(ended failed)" ]; then
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
      prepare | again | whole | card) call=$word ;;
      *)
        echo "quarter.sh: $word is no call: prepare, again, whole, card or none of them, and --smoke" >&2
        exit 2
        ;;
    esac
  done
  if [ $call = prepare ]; then
    prepare
    exit
  fi
  trap end TERM INT HUP
  [ $call != first ] || rm -rf "$state" "$site"
  mkdir -p "$state"
  [ -d "$site" ] || unpack
  [ -e "$state/commit" ] || commit > "$state/commit"
  case $call in
    whole) part whole 115 whole ;;
    card) part card 90 card ;;
    *) $call ;;
  esac
  echo
  cat "$state/parts.tsv"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@"
