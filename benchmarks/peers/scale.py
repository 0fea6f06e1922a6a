"""Claim: a pass begins and resumes anywhere in a second and 100 MiB, at 100 million samples.

Method   A data set that has a length and makes tiny samples, so that nothing but the order can take
         time or memory. Every row is a fresh process: it makes a loader, takes the first batch, and
         reports the seconds, and how much its memory grew beyond that of a loader over nine
         batches. Then a second loader loads a state from the middle of the pass and takes a batch.
         Rank 500 of 1,000 is simulated with `rank=`.
"""

import statistics
import time
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.process import read_memory_mib, run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_table

ROUNDS = 5
BATCH = 128
FULL = [(10**6, 1), (10**8, 1), (10**8, 1000)]
SMOKE = [(10**5, 1), (10**6, 100)]
"""Samples, ranks."""


class TinySamples:
    """Samples are made when they are asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((3, 8, 8), index % 251, dtype=torch.uint8), index


def begin_and_resume(samples: int, ranks: int, reuse: int) -> dict[str, Any]:
    """In a fresh process."""
    from loaders import ReuseLoader

    def make_loader() -> ReuseLoader:
        return ReuseLoader(TinySamples(samples), BATCH, reuse, workers=1, rank=(ranks // 2, ranks))

    with ReuseLoader(TinySamples(BATCH * 9), BATCH, reuse, workers=1) as loader:
        next(iter(loader))  # imports, threads
    row: dict[str, Any] = {"samples": samples, "ranks": ranks, "reuse": reuse}
    before, begin = read_memory_mib(), time.perf_counter()
    with make_loader() as loader:
        next(iter(loader))
        row |= {"first_s": time.perf_counter() - begin, "first_mib": read_memory_mib() - before}
        state = loader.state_dict() | {"served_batches": len(loader) // 2}
    state["running"] = state["next"]
    before, begin = read_memory_mib(), time.perf_counter()
    with make_loader() as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        row |= {"resume_s": time.perf_counter() - begin, "resume_mib": read_memory_mib() - before}
        assert loader.last_batch is not None and loader.last_batch.batch_index == len(loader) // 2
    return row


def measure_passes(options: Options) -> list[dict[str, Any]]:
    """Of each row the medians of its seconds, and the largest memory."""
    sizes = SMOKE if options.smoke else FULL
    keys = [(*size, reuse) for size in sizes for reuse in (1, 3)]
    rounds = [
        [run_in_fresh_process(begin_and_resume, *key) for key in keys]
        for _ in range(options.rounds)
    ]
    return [
        rows[0]
        | {key: statistics.median(row[key] for row in rows) for key in ("first_s", "resume_s")}
        | {key: max(row[key] for row in rows) for key in ("first_mib", "resume_mib")}
        for rows in zip(*rounds, strict=True)
    ]


def measure(options: Options) -> Report:
    rows = measure_passes(options)
    cells = [
        [f"{r['samples']:,}", f"{r['ranks']:,}", str(r["reuse"]), f"{r['first_s']:.3f}",
         f"{r['first_mib']:.1f}", f"{r['resume_s']:.3f}", f"{r['resume_mib']:.1f}"]
        for r in rows
    ]  # fmt: skip
    head = ["samples", "ranks", "reuse", "first batch, s", "MiB", "resume at half, s", "MiB"]
    worst = {key: max(row[key] for row in rows) for key in ("first_s", "first_mib", "resume_s")}
    return Report(
        "loader_scale",
        "Claim: a pass begins and resumes anywhere in a second and 100 MiB at 100 million samples",
        {"batch": BATCH, "rounds": options.rounds},
        {"A pass": format_table(head, cells)},
        [
            Target("first batch", 1.0, worst["first_s"], "s"),
            Target("memory of the first batch", 100.0, worst["first_mib"], "MiB"),
            Target("resume at half a pass", 1.0, worst["resume_s"], "s"),
        ],
        ["Seconds are wall time: those of a busy machine are upper bounds."],
        rows,
    )
