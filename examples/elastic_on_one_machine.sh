#!/bin/sh
# Three peers and an anchor on this machine train one run in PerFect's two phases. While it trains
# one peer is killed and another one joins. At the end perfect-replay trains it again, in one
# process, and compares every step.
#
#     sh examples/elastic_on_one_machine.sh [FOLDER]
#
# FOLDER has CIFAR-10 (cifar-10-batches-py in it). Without it small pictures are drawn. What the
# peers wrote is in runs/elastic_demo afterwards: see report.html of any of them.
set -eu

python=${PYTHON:-python}
here=${OUT:-runs/elastic_demo}
port=${PORT:-29400}
[ ! -e "$here" ] || { echo "$here is there already: remove it, or give OUT=FOLDER"; exit 2; }
mkdir -p "$here"
data=${1:-}
[ -z "$data" ] || data=$(cd "$data" && pwd)
cd "$here"

if [ -n "$data" ]; then
    data="{name: cifar10, root: $data, holdout: 500, train_samples: ${SAMPLES:-2000}}"
else
    "$python" - <<'DRAW'
"""Draws noisy pictures of three classes; the class is the strongest colour."""
from pathlib import Path

import numpy as np
from PIL import Image

dice = np.random.default_rng(0)
for part, each in (("train", 200), ("val", 40)):
    for channel, name in enumerate(("blue", "green", "red")):
        folder = Path("pictures", part, name)
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = dice.integers(0, 200, (48, 48, 3), dtype=np.uint8)
            pixels[..., 2 - channel] += 30
            Image.fromarray(pixels).save(folder / f"{number:03d}.jpg", quality=90)
DRAW
    data="{name: imagefolder, root: pictures, picture_size: 32, holdout: 60}"
fi

(umask 077 && "$python" -c "import secrets; print(secrets.token_hex(32))" > secret)  # or openssl
cat > run.yaml <<YAML
model: {name: pilot}
data: $data
augment: [{name: pad_crop, padding: 4}, {name: flip}]
loader: {batch_size: 64, buffer_batches: 3, workers: 1}
phases:
  - {name: pretrain, passes: ${PASSES:-4}, reuse: 3, ema: true, lr: {kind: constant, lr: 0.05, warmup: 0.1}}
  - {name: finetune, passes: ${PASSES:-4}, reuse: 1, ema: true, lr: {kind: linear, lr: 0.05}}
ema: {decay: 0.99}
trainer: {accelerator: cpu, threads: 1, validate_every: 2.0}
checkpoint: {every_steps: 20}
elastic: {secret_file: secret, lanes: 32}
YAML

peer() {
    "$python" -m perfect.train run.yaml --join "127.0.0.1:$port" --name "$1" --out "$1" \
        > "$1.txt" 2>&1 &
}
until_step() { # NAME STEP PID: wait until this peer has committed so many steps
    until [ "$(grep -cs '"commit"' "$1/elastic/$1.jsonl" || true)" -ge "$2" ] 2> /dev/null; do
        kill -0 "$3" 2> /dev/null || { echo "$1 has ended early:"; cat "$1.txt"; exit 1; }
        sleep 0.1
    done
}
end() { for pid in $anchor $a $b $c ${d:-}; do kill "$pid" 2> /dev/null || true; done; }

"$python" -m perfect.anchor --listen "127.0.0.1:$port" --secret-file secret --min-peers 2 &
anchor=$!
peer a; a=$!
peer b; b=$!
peer c; c=$!
trap end EXIT
until_step a 5 "$a"
echo "--- a fourth peer joins"
peer d; d=$!
until_step d 8 "$d"
echo "--- b is killed"
kill -9 "$b"
for pid in $a $c $d; do wait "$pid" || { echo "a peer failed:"; cat ./*.txt; exit 1; }; done
wait "$anchor" || { echo "the anchor failed"; exit 1; }
trap - EXIT
echo "--- what the peers saw"
tail -n 3 a.txt
echo "--- the run again, in one process"
"$python" -m perfect.replay a b c d
