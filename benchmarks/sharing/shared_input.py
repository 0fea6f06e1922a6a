"""Three consumers over JPEG pictures: three lone loaders beside three views of one shared stream.

lone     three ReuseLoaders with a seed in common, each in the thread of its consumer
shared   three views of one SharedStream, in three threads
one      one lone loader: what no sharing can be cheaper than

A consumer only looks at its batches, so decoding is what all wait for. All ways have the same
number of decoding threads altogether. Before anything is timed, every way runs once, and what its
consumers got is compared to the last bit.
"""

import hashlib
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.harness.rounds import alternate_rounds
from benchmarks.sharing.photos import pictures
from loaders import ReuseLoader, SharedStream
from loaders.augment import Chain, Flip, RandomResizedCrop

CONSUMERS, PASSES, WORKERS = 3, 2, 3


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    with tempfile.TemporaryDirectory() as folder:
        found, are_photos = pictures(Path(folder), smoke)
        crop = Chain([RandomResizedCrop(32 if smoke else 224), Flip()])
        settings = {"batch_size": 4 if smoke else 32, "reuse": 1, "augment": crop}
        return _report(found, settings, are_photos, repeats)


def _report(folder: Path, options: dict[str, Any], are_photos: bool, repeats: int) -> Report:
    ways: dict[str, Callable[[bool], tuple[list[str], int]]] = {
        "lone": lambda look: lone(folder, options, CONSUMERS, look),
        "shared": lambda look: shared(folder, options, look),
        "one": lambda look: lone(folder, options, 1, look),
    }
    samples = len(ReuseLoader(str(folder), **options).dataset)
    report = Report(
        "shared_input",
        "three models over one stream cost the decoding of one",
        {"pictures": samples, "passes": PASSES, "workers": WORKERS, "photos": are_photos},
    )
    got = {way: run(True)[0] for way, run in ways.items()}
    wrong = sum(digest != got["one"][0] for digests in got.values() for digest in digests)
    for number, order in alternate_rounds(ways, repeats):
        row: dict[str, Any] = {"round": number}
        for way in order:
            wall, cpu = perf_counter(), process_time()
            _, decodes = ways[way](False)
            row |= {f"{way}_wall": perf_counter() - wall, f"{way}_cpu": process_time() - cpu}
            row[f"{way}_decodes"] = decodes / samples / PASSES
        report.rows.append(row)
    _tell(report, wrong)
    return report


def _tell(report: Report, wrong: int) -> None:
    rows = report.rows

    def over(column: str) -> list[float]:
        return [row[f"lone_{column}"] / row[f"shared_{column}"] for row in rows]

    lines = [
        [
            way,
            format_spread([row[f"{way}_cpu"] for row in rows]),
            format_spread([row[f"{way}_wall"] for row in rows]),
            format_spread([row[f"{way}_decodes"] for row in rows], ".2f"),
        ]
        for way in ("lone", "shared", "one")
    ]
    head = ["way", "CPU s", "wall s", "decodes a sample and pass"]
    report.tables["Three consumers"] = format_table(head, lines)
    decodes = statistics.median(row["shared_decodes"] for row in rows)
    report.asked = [
        Target(
            "three lone loaders over shared, CPU", 2.5, statistics.median(over("cpu")), "x", True
        ),
        Target("the same, wall", 2.5, statistics.median(over("wall")), "x", True),
        Target("decodes a sample and pass, shared", 1.0, round(decodes, 6)),
        Target("consumers that got other bits than a lone loader's", 0, wrong),
    ]
    report.remarks.append(
        "Decodes are those that were served. A loader also decodes the first batches of a pass that"
        " nobody asks for; that is in the seconds of every way."
    )


def lone(
    folder: Path, options: dict[str, Any], consumers: int, look: bool
) -> tuple[list[str], int]:
    """Return what each consumer got, and how many samples were decoded for all."""
    workers = max(1, WORKERS // consumers)
    loaders = [ReuseLoader(str(folder), workers=workers, **options) for _ in range(consumers)]
    try:
        return consume(loaders, look), sum(loader.stats.decoded for loader in loaders)
    finally:
        for loader in loaders:
            loader.close()


def shared(folder: Path, options: dict[str, Any], look: bool) -> tuple[list[str], int]:
    """Return what each consumer got, and how many samples were decoded for all."""
    with SharedStream(ReuseLoader(str(folder), workers=WORKERS, **options)) as stream:
        views = [stream.view() for _ in range(CONSUMERS)]
        return consume(views, look), stream.stats.decoded


def consume(loaders: Sequence[Any], look: bool) -> list[str]:
    """Run a consumer of each loader in a thread, and return what it got: to `look`, the digest of
    everything, else that of a pixel a picture."""
    digests = [hashlib.blake2b() for _ in loaders]

    def run(number: int) -> None:
        for _ in range(PASSES):
            for batch, labels in loaders[number]:
                pixels = batch if look else batch[:, :1, :1, :1]
                digests[number].update(pixels.contiguous().numpy())
                digests[number].update(labels.numpy())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [digest.hexdigest() for digest in digests]
