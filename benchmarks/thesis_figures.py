"""Figures of the thesis's chapter 4 that are no training of a network, on this CPU.

    python benchmarks/thesis_figures.py loading FOLDER      4-2: fewer workers, lighter models
    python benchmarks/thesis_figures.py operations FOLDER   4-3: time an image of each operation
    python benchmarks/thesis_figures.py regression          4-5 to 4-7: a line, and reuse

Method  loading: a DataLoader of FOLDER/CLASS/*.jpg as the thesis's (Pillow, transforms v1), and a
        consumer that sleeps as long a batch as a model would train, at multiples of the rate of one
        worker. operations: CPU time of one thread, files read beforehand. regression: SGD a sample
        at a time, one pass over 50,000 points of y = 7 + 3 x + noise, rate 5e-5, from 0; reuse: a
        sample three times in a row. The thesis leaves out the range of x, so there are several.
Run     `--smoke` needs no folder and says nothing. OUT/DATE_thesis_figures_PART.md and .json.
"""

import argparse
import datetime
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from offloading.report import Report, measure_and_print, table
from peers.contract import Job
from peers.folders import listing, made_up_photos
from peers.torch_pillow import MEAN, SPREAD, TorchPillow
from PIL import Image
from torchvision import transforms

RESULTS = Path(__file__).parent / "results"
CROP, BATCH = 224, 32
RANGES = ((0.0, 1.0), (0.0, 10.0), (-5.0, 5.0), (0.0, 100.0))
RATE, TRUTH = 5e-5, (7.0, 3.0)
PACES = (0.5, 1.0, 2.0, 4.0)
"""Of the rate of one worker: the larger, the lighter the model."""


def loading(folder: Path) -> Report:
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    one = 0.0
    for workers in range(1, cores + 1):
        job = Job(folder, 0, BATCH, workers, CROP, None, 0)
        loader = TorchPillow("v2").open(job, folder)
        rate = _pass(loader, 0.0)[0]
        one = one or rate
        waits = {f"{pace:g}x": _pass(loader, BATCH / (pace * one))[1] for pace in PACES}
        rows.append({"workers": workers, "images a second": rate, **waits})
    head = ["workers", "images a second", *(f"waits at {pace:g}x, %" for pace in PACES)]
    lines = [
        [
            str(row["workers"]), f"{row['images a second']:.0f}",
            *(f"{100 * row[f'{pace:g}x']:.0f}" for pace in PACES),
        ]
        for row in rows
    ]  # fmt: skip
    return Report("loading", "Figure 4-2: who waits for the loader", {"batch": BATCH},
                  {"Workers, and consumers of so many times one worker's rate": table(head, lines)},
                  rows=rows)  # fmt: skip


def _pass(loader: Any, batch_seconds: float) -> tuple[float, float]:
    """Images a second, and the share of the time for which the consumer waited."""
    began, waited, served = time.perf_counter(), 0.0, 0
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        waited += time.perf_counter() - asked
        served += len(batch[0])
        time.sleep(batch_seconds)
    took = time.perf_counter() - began
    return served / took, waited / took


def operations(folder: Path, smoke: bool) -> Report:
    files = [path.read_bytes() for path in listing(folder)[0][: 20 if smoke else 500]]
    steps: dict[str, Callable[[Any], Any]] = {
        "open and decode (Pillow)": lambda data: Image.open(BytesIO(data)).convert("RGB"),
        "RandomResizedCrop": transforms.RandomResizedCrop(CROP),
        "RandomHorizontalFlip": transforms.RandomHorizontalFlip(),
        "ToTensor": transforms.ToTensor(),
        "Normalize": transforms.Normalize(MEAN, SPREAD),
    }
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for data in files:
        value: Any = data
        for name, step in steps.items():
            began = time.thread_time()
            value = step(value)
            spent[name].append(time.thread_time() - began)
    means = {name: 1e6 * statistics.fmean(times) for name, times in spent.items()}
    whole = sum(means.values())
    lines = [[name, f"{us:.0f}", f"{us / whole:.0%}"] for name, us in means.items()]
    return Report("operations", "Figure 4-3: what an image's preprocessing consists of",
                  {"pictures": len(files), "crop": CROP},
                  {"CPU time": table(["operation", "us an image", "share"], lines)},
                  rows=[{"operation": name, "us": us} for name, us in means.items()])  # fmt: skip


def descend(low: float, high: float, reuse: int, points: int, seed: int = 0) -> dict[str, float]:
    """One pass of SGD, and what the figures show of it."""
    rng = random.Random(seed)
    first = second = 0.0
    seen: tuple[list[float], list[float]] = ([], [])
    losses: list[float] = []
    for _ in range(points):
        x = rng.uniform(low, high)
        y = TRUTH[0] + TRUTH[1] * x + rng.gauss(0, 1)
        for _ in range(reuse):
            error = first + second * x - y
            first, second = first - RATE * error, second - RATE * error * x
            seen[0].append(first)
            seen[1].append(second)
            losses.append(error * error / 2)
    tail = -(-len(losses) // 10)
    return {
        "variance": sum(statistics.pvariance(values) for values in seen),
        "variance of the last tenth": sum(statistics.pvariance(v[-tail:]) for v in seen),
        "loss of the last tenth": statistics.fmean(losses[-tail:]),
        "theta 0": first, "theta 1": second,
    }  # fmt: skip


def regression(smoke: bool) -> Report:
    rows = [
        {"x": f"[{low:g}, {high:g}]", "reuse": reuse,
         **descend(low, high, reuse, 500 if smoke else 50_000)}
        for low, high in RANGES
        for reuse in (1, 3)
    ]  # fmt: skip
    lines = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return Report("regression", "Figures 4-5 to 4-7: y = 7 + 3 x + noise", {"rate": RATE},
                  {"One pass, reuse three times in a row": table(list(rows[0]), lines)},
                  remarks=["Variances are of the parameters along the way, their sum as in the"
                           " thesis, which reports 2.17 with reuse and 1.85 without."],
                  rows=rows)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=["loading", "operations", "regression"])
    parser.add_argument("folder", type=Path, nargs="?", help="FOLDER/CLASS/*.jpg")
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    stem = args.out / f"{args.date}_thesis_figures_{args.part}"
    if args.part == "regression":
        return measure_and_print(partial(regression, args.smoke), stem)
    if args.folder is None and not args.smoke:
        parser.error("give the folder of pictures, or --smoke for made-up ones")
    with tempfile.TemporaryDirectory() as made_up:
        folder = args.folder or made_up_photos(Path(made_up), 32)
        if args.part == "loading":
            measure_and_print(partial(loading, folder), stem)
        else:
            measure_and_print(partial(operations, folder, args.smoke), stem)


if __name__ == "__main__":
    main()
