"""Ours against the loaders people use: CPU time an image, rate, memory, start-up and stalls.

Claim   Serving a decoded sample again costs a fraction of any loader that decodes for every serve;
        a converted, pre-decoded file (FFCV raw) is the peer to beat.
Method  A random resized crop to 224 (area 0.08 to 1, ratio 3/4 to 4/3) and a flip, shuffled, every
        peer as it does best. Every row in a process of its own, opened once; `--repeats` rounds
        after a warm-up pass, a pass a row and round, in another order each round. CPU: user and
        system of the process and its workers, from rest to rest. Rate: to the last batch, or to
        rest for a loader that has then begun the next pass. Memory: peak RSS, and what workers hold
        alone. Stalls: a consumer that sleeps so long a batch, at multiples of the rate at which we
        decode without reuse here; the share of wall time for which it waits for batches.
Run     python -m benchmarks.peers FOLDER        FOLDER/CLASS/*.jpg, or in FOLDER/train
        `--smoke` needs no folder and takes seconds. `FOLDER --asked` is the short table of what was
        asked of us, in about five minutes. Peers: pip install 'perfect-training[bench]'; what is
        missing is said in the table with how to get it, also FFCV, which needs headers.

        rows -> a child each -> prepare, open -> rounds of passes -> stalls -> report
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.command import add_common_options, measure_and_write
from benchmarks.harness.report import Report
from benchmarks.harness.rounds import shuffle_rounds
from benchmarks.peers import folders
from benchmarks.peers.children import Child, PeerFailed
from benchmarks.peers.contract import Job, Row
from benchmarks.peers.report import Seen, report
from benchmarks.peers.rows import ROWS

BATCH, SMOKE_BATCH = 64, 8
PICTURES, SMOKE_PICTURES = 2048, 24
LARGE = 12
"""One picture of 1920x1440 for so many others."""
CROP, WORKERS = 224, 2
PACES = (4.0, 3.0, 2.0, 1.0, 0.5)
"""Fastest first: a slower consumer would leave the one after it a stock."""
PACEMAKER = "ours-1"


def start(row: Row, job: Job, work: Path, stack: ExitStack) -> tuple[Seen, Child | None]:
    """Convert (in a process that ends then), open, one pass to warm up."""
    seen = Seen(row)
    try:
        if row.converts:
            with Child(row, job, work) as child:
                seen.conversion = child.ask("prepare")
        with ExitStack() as opening:
            child = opening.enter_context(Child(row, job, work))
            seen.hello = child.hello
            seen.start = child.ask("open")
            check(seen, job)
            stack.push(opening.pop_all())
    except PeerFailed as problem:
        seen.problem = str(problem)
        return seen, None
    return seen, child


def check(seen: Seen, job: Job) -> None:
    """It serves what was asked for: a fast loader of something else proves nothing."""
    shape, served = seen.start["shape"][1:], seen.start["served"]
    if sorted(shape) != sorted([3, job.crop, job.crop]):
        raise PeerFailed(f"failed: served pictures of {shape}, not of {job.crop} pixels")
    if served != job.pictures * seen.row.serves:
        raise PeerFailed(
            f"failed: served {served} in a pass, not {seen.row.serves} x {job.pictures}"
        )
    if seen.start["spread"] == 0:
        raise PeerFailed("failed: served a picture of one colour")


def rounds(seen: dict[str, Seen], living: dict[str, Child], repeats: int) -> None:
    """Every row a pass a round, in a fresh order."""
    rested = dict.fromkeys(living, time.monotonic())
    for number, order in shuffle_rounds(living, repeats):
        for key in [key for key in order if key in living]:
            idle_wall = time.monotonic() - rested[key]
            try:
                measured = living[key].ask("serve")
            except PeerFailed as problem:
                seen[key].problem = str(problem)
                living.pop(key).close()
                continue
            rested[key] = time.monotonic()
            seen[key].passes.append(measured | {"idle_wall": idle_wall})
        say(f"round {number + 1} of {repeats}, load {os.getloadavg()[0]:.1f}")


def stalls(
    seen: dict[str, Seen], living: dict[str, Child], args: argparse.Namespace, batch: int
) -> float:
    """Returns the rate that the paces are multiples of."""
    if PACEMAKER not in living or not args.stall_seconds:
        return 0.0
    rate = statistics.median(seen[PACEMAKER].rate)
    for number, order in shuffle_rounds(living, args.stall_repeats):
        for key in [key for key in order if key in living]:
            for pace in PACES:
                try:
                    answer = living[key].ask(
                        "stall", batch_seconds=batch / (pace * rate), seconds=args.stall_seconds
                    )
                except PeerFailed as problem:
                    seen[key].problem = str(problem)
                    living.pop(key).close()
                    break
                seen[key].stall.setdefault(f"{pace:g}x", []).append(answer["stall"])
        say(f"stalls, {number + 1} of {args.stall_repeats}")
    return rate


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def folder_of(args: argparse.Namespace, work: Path) -> tuple[Path, int]:
    """Where the pictures are, and how many a pass has."""
    pictures = args.pictures or (SMOKE_PICTURES if args.smoke else PICTURES)
    if args.folder is None and not args.smoke:
        raise SystemExit("give the folder of pictures, or --smoke for made-up ones")
    if args.folder is None:
        args.folder = folders.made_up_photos(work / "made_up", pictures)
    inner = args.folder / "train"
    source = inner if inner.is_dir() else args.folder
    # Links, named by how many there are: conversions of an earlier run fit them.
    linked = work / f"pictures_{pictures}"
    if not linked.exists():
        folders.repeat(source, pictures, linked)
    return linked, pictures


def run(args: argparse.Namespace, rows: Sequence[Row], work: Path) -> Report:
    folder, pictures = folder_of(args, work)
    batch = SMOKE_BATCH if args.smoke else BATCH
    job = Job(folder, pictures, batch, WORKERS, CROP, seed=0)
    large = job
    if any(row.large for row in rows):
        count = max(batch, pictures // LARGE)
        place = work / f"large_{count}"
        made = place if place.exists() else folders.enlarged(folder, count, place)
        large = replace(job, folder=made, pictures=count)
    with ExitStack() as stack:
        seen: dict[str, Seen] = {}
        living: dict[str, Child] = {}
        for row in rows:
            place = work / f"photos_{pictures}"
            seen[row.key], child = start(row, large if row.large else job, place, stack)
            say(f"{row.name}: {seen[row.key].problem or 'ready'}")
            if child is not None:
                living[row.key] = child
        rounds(seen, living, args.repeats)
        rate = stalls(seen, living, args, batch)
        for key, child in living.items():
            seen[key].memory = child.ask("memory")
    setting = {k: v for k, v in asdict(job).items() if k != "folder"} | {
        "pictures_of_1920x1440": large.pictures if large is not job else 0,
        "threads_of_a_library_per_process": 1, "repeats": args.repeats,
        "stall_seconds": args.stall_seconds,
        "stall_repeats": args.stall_repeats, "pace_of_1x_images_per_second": round(rate),
    }  # fmt: skip
    return report(setting, list(seen.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="keeps conversions for another run")
    parser.add_argument("--only", default="", help="keys of rows, by commas; --only ? lists them")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--pictures", type=int, help="a pass; links repeat a smaller folder")
    parser.add_argument("--stall-seconds", type=float, default=None, help="a pace; 0: none")
    parser.add_argument("--stall-repeats", type=int, default=None)
    parser.add_argument("--asked", action="store_true", help="what was asked of us, without stalls")
    add_common_options(parser)
    args = parser.parse_args()
    args.smoke &= not args.asked
    if args.asked and args.pictures is None:
        args.pictures = PICTURES // 2
    for name, usual, smoke in (
        ("repeats", 7 if args.asked else 5, 1),
        ("stall_seconds", 0 if args.asked else 3, 0.1),
        ("stall_repeats", 2, 1),
    ):
        if getattr(args, name) is None:
            setattr(args, name, smoke if args.smoke else usual)
    return args


def chosen(args: argparse.Namespace) -> list[Row]:
    keys = [row.key for row in ROWS]
    preset = [row for row in ROWS if row.asked or not args.asked]
    wanted = [row.key for row in preset if row.smoke or not args.smoke]
    wanted = args.only.split(",") if args.only else wanted
    if unknown := [key for key in wanted if key not in keys]:
        raise SystemExit(f"no row {', '.join(unknown)}; there are {', '.join(keys)}")
    return [row for row in ROWS if row.key in wanted]


def main() -> None:
    args = arguments()
    rows = chosen(args)
    name = "asked" if args.asked else "photos"
    with tempfile.TemporaryDirectory() as place:
        work = (args.work or Path(place)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"{args.date}_loader_vs_peers_{name}"
        measure_and_write(partial(run, args, rows, work), stem)


if __name__ == "__main__":
    main()
