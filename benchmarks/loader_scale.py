"""Claim: a pass begins and resumes anywhere in a second and 100 MiB, at 100 million samples.

    python benchmarks/loader_scale.py [--smoke] [--files N]
                                                        OUT/DATE_loader_scale.md and .json

Method: a data set that has a length and makes tiny samples, so that nothing but the order can take
time or memory. Every row is a process of its own: it makes a loader, takes the first batch, and
reports the seconds, and how much its peak memory grew beyond that of a loader over nine batches.
Then a second loader loads a state from the middle of the pass and takes a batch. Rank 500 of 1,000
is simulated with `rank=`. Opening a folder of `--files` empty files is measured
beside torchvision's `ImageFolder`, in CPU seconds and interleaved, after one round of each: the
walk of both is linear in the files.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CLAIM = "Beginning and resuming a pass at 100 million samples"
BATCH = 128
FULL = [(10**6, 1), (10**8, 1), (10**8, 1000)]
SMOKE = [(10**5, 1), (10**6, 100)]
"""Samples, ranks."""
FILES_A_FOLDER = 1000


class Tiny:
    """Samples are made when they are asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((3, 8, 8), index % 251, dtype=torch.uint8), index


def one_row(samples: int, ranks: int, reuse: int) -> dict[str, Any]:
    """What a process of its own measures."""
    from loaders import ReuseLoader

    def made() -> ReuseLoader:
        return ReuseLoader(Tiny(samples), BATCH, reuse, workers=1, rank=(ranks // 2, ranks))

    next(iter(ReuseLoader(Tiny(BATCH * 9), BATCH, reuse, workers=1)))  # imports, first threads
    found: dict[str, Any] = {"samples": samples, "ranks": ranks, "reuse": reuse}
    before, started = _peak_mib(), time.perf_counter()
    with made() as loader:
        next(iter(loader))
        found |= {"first_s": time.perf_counter() - started, "first_mib": _peak_mib() - before}
        state = loader.state_dict() | {"served_batches": len(loader) // 2}
    state["running"] = state["next"]
    before, started = _peak_mib(), time.perf_counter()
    with made() as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        found |= {"resume_s": time.perf_counter() - started, "resume_mib": _peak_mib() - before}
        assert loader.last_batch is not None and loader.last_batch.batch_index == len(loader) // 2
    return found


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows(sizes: list[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """All rows, interleaved; of each the medians, and the largest memory."""
    seen: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for samples, ranks in sizes:
            for reuse in (1, 3):
                what = json.dumps([samples, ranks, reuse])
                command = [sys.executable, __file__, "--row", what]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seen.setdefault((samples, ranks, reuse), []).append(json.loads(done.stdout))
    return [
        found[0]
        | {key: statistics.median(one[key] for one in found) for key in ("first_s", "resume_s")}
        | {key: max(one[key] for one in found) for key in ("first_mib", "resume_mib")}
        for found in seen.values()
    ]


def walks(files: int, repeats: int) -> list[dict[str, float]]:
    """CPU seconds of opening the same folder, ours and torchvision's."""
    from torchvision.datasets import ImageFolder

    from loaders.sources.datasets import picture_folder

    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as root:
        for folder in range(-(-files // FILES_A_FOLDER)):
            inside = Path(root, f"n{folder:08d}")
            inside.mkdir()
            for n in range(min(FILES_A_FOLDER, files - folder * FILES_A_FOLDER)):
                (inside / f"{inside.name}_{n:06d}.JPEG").touch()
        for round_ in range(repeats + 1):
            started = time.process_time()
            ours = picture_folder(Path(root))
            between = time.process_time()
            theirs = ImageFolder(root)
            ended = time.process_time()
            assert len(ours) == len(theirs) == files
            if round_:
                found.append({"ours": between - started, "torchvision": ended - between})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--smoke", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--files", type=int, default=None, help="files of the folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        print(json.dumps(one_row(*json.loads(given.row))))
        return
    from offloading.report import Asked, Report, measure_and_print, ratios, spread, table

    files = given.files or (2_000 if given.smoke else 100_000)
    repeats = 1 if given.smoke else given.repeats

    def measure() -> Report:
        found = rows(SMOKE if given.smoke else FULL, repeats)
        walked = walks(files, repeats)
        ours, theirs = ([one[name] for one in walked] for name in ("ours", "torchvision"))
        cells = [
            [f"{r['samples']:,}", f"{r['ranks']:,}", str(r["reuse"]), f"{r['first_s']:.3f}",
             f"{r['first_mib']:.1f}", f"{r['resume_s']:.3f}", f"{r['resume_mib']:.1f}"]
            for r in found
        ]  # fmt: skip
        head = ["samples", "ranks", "reuse", "first batch, s", "MiB", "resume at half, s", "MiB"]
        per = 1e6 / files
        opened = [
            ["ours", spread([s * per for s in ours])],
            ["torchvision ImageFolder", spread([s * per for s in theirs])],
        ]
        worst = {key: max(r[key] for r in found) for key in ("first_s", "first_mib", "resume_s")}
        asked = [
            Asked("first batch", 1.0, worst["first_s"], "s"),
            Asked("memory of the first batch", 100.0, worst["first_mib"], "MiB"),
            Asked("resume at half a pass", 1.0, worst["resume_s"], "s"),
            Asked(
                "opening a folder", 1.5, statistics.median(ratios(ours, theirs)), "x torchvision"
            ),
        ]
        return Report(
            "loader_scale",
            CLAIM,
            {"batch": BATCH, "repeats": repeats, "files": files, "cores": os.cpu_count()},
            {"A pass": table(head, cells), "A folder, CPU us a file": table(["", "us"], opened)},
            asked,
            ["Seconds are wall time: those of a busy machine are upper bounds."],
            [*found, {"walks": walked}],
        )

    measure_and_print(measure, given.out / f"{given.date}_loader_scale")


if __name__ == "__main__":
    main()
