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
import tarfile
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from offloading.report import Asked, Report, spread, table
from peers import folders

from loaders import ReuseLoader, SharedStream
from loaders.augment import Chain, Flip, RandomResizedCrop

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos500.tar"
CONSUMERS, PASSES, WORKERS = 3, 2, 3


def measure(smoke: bool, repeats: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        are_photos = PHOTOS.exists() and not smoke
        pictures = _pictures(Path(folder), smoke, are_photos)
        crop = Chain([RandomResizedCrop(32 if smoke else 224), Flip()])
        options = {"batch_size": 4 if smoke else 32, "reuse": 1, "augment": crop}
        return _report(pictures, options, are_photos, repeats)


def _report(pictures: Path, options: dict[str, Any], are_photos: bool, repeats: int) -> Report:
    ways: dict[str, Callable[[bool], tuple[list[str], int]]] = {
        "lone": lambda look: lone(pictures, options, CONSUMERS, look),
        "shared": lambda look: shared(pictures, options, look),
        "one": lambda look: lone(pictures, options, 1, look),
    }
    samples = len(ReuseLoader(str(pictures), **options).dataset)
    report = Report(
        "shared_input",
        "three models over one stream cost the decoding of one",
        {"pictures": samples, "passes": PASSES, "workers": WORKERS, "photos": are_photos},
    )
    got = {way: run(True)[0] for way, run in ways.items()}
    wrong = sum(digest != got["one"][0] for digests in got.values() for digest in digests)
    for number in range(repeats):
        row: dict[str, Any] = {"round": number}
        for way in list(ways)[:: -1 if number % 2 else 1]:
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
            spread([row[f"{way}_cpu"] for row in rows]),
            spread([row[f"{way}_wall"] for row in rows]),
            spread([row[f"{way}_decodes"] for row in rows], ".2f"),
        ]
        for way in ("lone", "shared", "one")
    ]
    head = ["way", "CPU s", "wall s", "decodes a sample and pass"]
    report.tables["Three consumers"] = table(head, lines)
    decodes = statistics.median(row["shared_decodes"] for row in rows)
    report.asked = [
        Asked(
            "three lone loaders over shared, CPU", 2.5, statistics.median(over("cpu")), "x", True
        ),
        Asked("the same, wall", 2.5, statistics.median(over("wall")), "x", True),
        Asked("decodes a sample and pass, shared", 1.0, round(decodes, 6)),
        Asked("consumers that got other bits than a lone loader's", 0, wrong),
    ]
    report.remarks.append(
        "Decodes are those that were served. A loader also decodes the first batches of a pass that"
        " nobody asks for; that is in the seconds of every way."
    )


def lone(
    pictures: Path, options: dict[str, Any], consumers: int, look: bool
) -> tuple[list[str], int]:
    """Return what each consumer got, and how many samples were decoded for all."""
    workers = max(1, WORKERS // consumers)
    loaders = [ReuseLoader(str(pictures), workers=workers, **options) for _ in range(consumers)]
    try:
        return consume(loaders, look), sum(loader.stats.decoded for loader in loaders)
    finally:
        for loader in loaders:
            loader.close()


def shared(pictures: Path, options: dict[str, Any], look: bool) -> tuple[list[str], int]:
    """Return what each consumer got, and how many samples were decoded for all."""
    with SharedStream(ReuseLoader(str(pictures), workers=WORKERS, **options)) as stream:
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


def _pictures(folder: Path, smoke: bool, are_photos: bool) -> Path:
    """A folder of photos, or of pictures that are made up and decode faster."""
    if not are_photos:
        return folders.made_up_photos(folder / "made_up", 24 if smoke else 500)
    with tarfile.open(PHOTOS) as photos:
        photos.extractall(folder, filter="data")
    classes = [path.parent for path in folder.rglob("*.jpg")]
    return classes[0].parent
