"""Accuracy against seconds: reuse, a decoded cache, echo and plain decoding, by perfect-train.

Claim   Where decoding is slower than training, reuse reaches an accuracy sooner than decoding every
        time; a cache of the whole decoded set is sooner still; beside a cache of half of it, reuse
        helps. benchmarks/feeding_model.py predicts the seconds.
Method  results/2026-11-24_preregistration_wall_clock.md. CIFAR-10 enlarged to JPEG files of 256
        pixels, 24 epochs of 8,000 pictures, the pilot net, one thread of training and one worker.
        Seeds outermost. Seconds want an idle machine; decodes and accuracies do not.
Run     OMP_NUM_THREADS=1 python benchmarks/wall_clock.py run --data DIR --work WORK
        python benchmarks/wall_clock.py report
        A run that is in OUT/2026-11-24_wall_clock.jsonl is skipped. One that was cut short begins
        anew, since its seconds would not compare. `run --smoke --work WORK` needs no data.

        DIR/cifar-10-batches-py -> WORK/pictures -> perfect-train -> a line a run -> report
"""

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accuracy.paired import Sample
from offloading.report import table
from peers.folders import cifar10, made_up_cifar10
from provenance import provenance
from wall_clock_data import STORED, EnlargedCifar, write_pictures

from benchmarks.feeding_model import FeedingCosts, Way, seconds
from loaders.cache.cache import RAM_ENTRY_BYTES

HERE = Path(__file__).parent
NAME = "2026-11-24_wall_clock.jsonl"
SEEDS = (0, 1, 2)
CACHED_BYTES = 3 * STORED**2 + RAM_ENTRY_BYTES + 64
"""Of a sample in the cache: its pixels, what Python keeps about it, and gaps."""
BELOW = 1.0
"""Points below no reuse's mean accuracy at the end: the accuracy that runs are timed to."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    train: int = 8000
    evaluated: int = 2000
    """Pictures of validation, and of the test."""
    batch: int = 320
    constant: int = 18
    """Epochs at the constant rate."""
    falling: int = 6
    """Epochs in which the rate falls to 0."""


SMOKE = Size(48, 12, 12, 6, 3)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    way: Way
    reuse: int = 1
    at_the_end: int = 1
    """Reuse while the rate falls."""
    mode: str = "rolling"
    cached: float = 0.0
    """The share of the decoded set that the cache holds."""

    def phases(self, size: Size) -> list[tuple[int, int]]:
        """(passes, reuse)"""
        return [
            (size.constant // self.reuse, self.reuse),
            (size.falling // self.at_the_end, self.at_the_end),
        ]


PLAIN, REUSE, CACHED = "no reuse, no cache", "reuse 3", "cache of 100 %"
ROWS = (
    Row(PLAIN, "plain"),
    Row(REUSE, "reuse", 3),
    Row("reuse 6", "reuse", 6),
    Row("batch echoing, 3 to the end", "reuse", 3, 3, "immediate"),
    Row(CACHED, "cache", cached=1.0),
    Row("cache of 50 %", "cache", cached=0.5),
    Row("reuse 3, cache of 50 %", "reuse and cache", 3, cached=0.5),
)
PAIRS = ((REUSE, PLAIN), (CACHED, REUSE), ("reuse 3, cache of 50 %", "cache of 50 %"))
"""Registered: the first reaches the accuracy sooner than the second."""


def pictures(data: Path, work: Path, size: Size) -> Path:
    """Training, validation and test are different pictures of CIFAR-10's training set."""
    root = work / f"pictures_{size.train}"
    bounds = (0, size.train, size.train + size.evaluated, size.train + 2 * size.evaluated)
    pixels, labels = cifar10(data, bounds[-1])
    for part, first, last in zip(("train", "val", "test"), bounds, bounds[1:], strict=False):
        write_pictures(pixels[first:last], labels[first:last], root / part)
    return root


def config(row: Row, seed: int, root: Path, size: Size) -> dict[str, Any]:
    rate = 0.3
    steady, last = row.phases(size)
    cache = round(row.cached * size.train * CACHED_BYTES)
    given = {"cache": "ram", "cache_bytes": cache} if cache else {}
    return {
        "seed": seed,
        "model": {"name": "pilot", "num_classes": 10},
        "data": {"class_path": "wall_clock_data.EnlargedCifar", "init_args": {"root": str(root)}},
        "augment": [{"name": "pad_crop", "padding": 4}, {"name": "flip"}],
        "loader": {"batch_size": size.batch, "buffer_batches": 1 if row.mode == "immediate" else 12,
                   "mode": row.mode, "workers": 1, **given},
        "optimizer": {"name": "sgd", "lr": rate, "momentum": 0.9, "nesterov": True,
                      "weight_decay": 5e-4},
        "phases": [
            {"name": "steady", "passes": steady[0], "reuse": steady[1],
             "lr": {"kind": "constant", "lr": rate, "warmup": 0.1}},
            {"name": "falling", "passes": last[0], "reuse": last[1],
             "lr": {"kind": "linear", "lr": rate}},
        ],
        "switch": {"rule": "fixed"},
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "32-true",
                    "validate_every": 1.0, "threads": 1},
        "loggers": [],
    }  # fmt: skip


def train(row: Row, seed: int, root: Path, work: Path, size: Size) -> Line:
    """By perfect-train, in a process and a folder of its own."""
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = work / "run.yaml"
    recipe.write_text(yaml.safe_dump(config(row, seed, root, size)), encoding="utf-8")
    command = [sys.executable, "-m", "perfect.train", str(recipe), "--out", str(folder)]
    subprocess.run(command, cwd=HERE, check=True, stdout=sys.stderr)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    kept = ("accuracy", "wall_seconds", "stall_seconds", "decoded_samples", "served_samples")
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        curve = [
            (float(line["wall_seconds"]), float(line["val_accuracy"]))
            for line in csv.DictReader(file)
            if line.get("val_accuracy")
        ]
    return {"row": row.name, "seed": seed, **{key: run[key] for key in kept}, "curve": curve}


def decode_seconds(root: Path) -> float:
    """Of one picture, as the data set decodes it: the mean over at most 500."""
    folder = EnlargedCifar(str(root)).folders["train"]
    count = min(500, len(folder))
    began = time.thread_time()
    for index in range(count):
        folder[index]
    return (time.thread_time() - began) / count


def read(path: Path) -> list[Line]:
    """A line that a crash cut short does not count."""
    if not path.exists():
        return []
    whole = [text for text in path.read_text("utf-8").splitlines(True) if text.endswith("\n")]
    return [json.loads(text) for text in whole]


def run(args: argparse.Namespace) -> None:
    size = SMOKE if args.smoke else Size()
    work: Path = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = made_up_cifar10(work / "made_up", 5 * size.train) if args.smoke else args.data
    root = pictures(data, work, size)
    about = {"decode_seconds": decode_seconds(root), "provenance": provenance()}
    path: Path = args.out / NAME
    done = {(line["row"], line["seed"]) for line in read(path)}
    for seed in SEEDS[:1] if args.smoke else SEEDS:
        for row in ROWS:
            if (row.name, seed) not in done:
                line = {**train(row, seed, root, work, size), **about}
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".partial")
                lines = [json.dumps(known) + "\n" for known in [*read(path), line]]
                part.write_text("".join(lines), encoding="utf-8")
                part.replace(path)
                print(f"{row.name}, seed {seed}: {line['wall_seconds']:.0f} s", flush=True)


def reached(line: Line, accuracy: float) -> float:
    """Seconds until validation first shows it; infinite if it never does."""
    return min((at for at, seen in line["curve"] if seen >= accuracy), default=math.inf)


def report(lines: Sequence[Line], size: Size) -> str:
    by_row: dict[str, dict[int, Line]] = {row.name: {} for row in ROWS}
    for line in lines:
        by_row[line["row"]][line["seed"]] = line
    if any(not seeds for seeds in by_row.values()):
        missing = ", ".join(name for name, seeds in by_row.items() if not seeds)
        return f"not run yet: {missing}"
    ends = [line["curve"][-1][1] for line in by_row[PLAIN].values()]
    target = sum(ends) / len(ends) - BELOW / 100
    head = ["row", "n", "decodes", "accuracy %", "seconds", "predicted", f"to {target:.1%}"]
    rows = [_cells(row, by_row, size, target) for row in ROWS]
    pairs = [f"- {_sooner(by_row, *pair, target)}" for pair in PAIRS]
    return "\n".join([table(head, rows), "", *pairs])


def _cells(
    row: Row, by_row: Mapping[str, Mapping[int, Line]], size: Size, target: float
) -> list[str]:
    mine = list(by_row[row.name].values())

    def mean(key: str) -> float:
        return sum(line[key] for line in mine) / len(mine)

    free = list(by_row[CACHED].values())
    step = sum((line["wall_seconds"] - line["stall_seconds"]) / line["served_samples"]
               for line in free) / len(free)  # fmt: skip
    costs = FeedingCosts(mean("decode_seconds"), 0.0, step)
    predicted = seconds(row.way, row.phases(size), row.cached, size.train, costs)
    when = [f"{reached(line, target):.0f}" for line in mine]
    return [
        row.name, str(len(mine)), f"{mean('decoded_samples'):,.0f}",
        f"{100 * mean('accuracy'):.2f}", f"{mean('wall_seconds'):.0f}", f"{predicted:.0f}",
        ", ".join(when),
    ]  # fmt: skip


def _sooner(by_row: Mapping[str, Mapping[int, Line]], one: str, other: str, target: float) -> str:
    """The ratio of the times to the target, with its interval, over pairs of a seed."""
    seeds = sorted(by_row[one].keys() & by_row[other].keys())
    times = [[reached(by_row[name][s], target) for name in (one, other)] for s in seeds]
    if len(seeds) < len(SEEDS) or not all(math.isfinite(t) for pair in times for t in pair):
        return f"{one} against {other}: not every run of both is there and reached it; no verdict."
    logs = Sample(tuple(math.log(a / b) for a, b in times))
    interval = logs.interval()
    assert interval is not None  # there are several seeds
    low, high = (math.exp(value) for value in interval)
    verdict = "sooner" if high < 1 else "later" if low > 1 else "undecided"
    return (
        f"{one} against {other}: {math.exp(logs.mean):.2f} times its seconds"
        f" [{low:.2f}, {high:.2f}]: {verdict}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--data", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--work", type=Path, help="pictures and the run in progress: 100 MB")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="see that it works: made-up pictures")
    args = parser.parse_args(argv)
    if args.what == "run":
        if args.work is None or not (args.data or args.smoke):
            parser.error("a run needs --work, and --data unless it is a --smoke")
        run(args)
    print(report(read(args.out / NAME), SMOKE if args.smoke else Size()))


if __name__ == "__main__":
    main()
