"""Part h's compiled step, before its data is there: does it compile, and what does that take?

    python -m gpu.compiles OUT [--smoke]        -> OUT/gpu_compiles.json

Made-up pictures, as many steps as two batch sizes need to be compiled, for each net of part h.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from accuracy.bench import Bench
from accuracy.data import synthetic_pictures
from accuracy.gpu import gpu_presets
from accuracy.recipes import Run, wsd
from accuracy.train import Watch, train

from gpu.machine import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.compiles", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny nets on the CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.smoke else "cuda")
    rows = [
        {"preset": name, **_steps(name, args.smoke, device)} for name in ("S1", "S3")
    ]  # fmt: skip
    found = {"machine": record(device.type), "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_compiles.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(rows))


def _steps(preset: str, smoke: bool, device: torch.device) -> dict[str, float]:
    """Four steps of the batch and four of half of it, each with a look at what is held out."""
    given = gpu_presets(tiny=smoke)[preset][0]
    size = given.batch_size
    task = replace(given, train=4 * size // 10 * 10, holdout=100, selection=0, epochs=2, warmup=0)
    phases = wsd(task, [(1, 1), (1, 1)], 1)
    halved = (phases[0], replace(phases[1], batch_size=size // 2))
    bench = Bench(task, synthetic_pictures(task, device), device)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Path(folder) / "compiles.ckpt", math.inf)
        made = train(bench, Run("compiles", halved), 0, watch)
    return {"seconds": time.monotonic() - begun, "steps": made["steps"], "test": made["test"]}


if __name__ == "__main__":
    main()
