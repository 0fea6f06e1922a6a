"""CIFAR-10 in two archives of less than 50 MB, for a machine to which little travels at a time.

    python -m gpu.carried pack CIFAR OUT           CIFAR holds data_batch_1 to _5 and test_batch
    python -m gpu.carried unpack DATA ARCHIVE ...  into DATA/cifar-10-batches-py, pixels checked
    python -m gpu.carried check CIFAR DATA/cifar-10-batches-py

    batch [10,000 x 3 x 32 x 32] -> strips of 500 pictures, one below the other -> WebP, lossless
    OUT/cifar10_a.zip   data_batch_1 to _3
    OUT/cifar10_b.zip   data_batch_4 and _5, test_batch

An archive has the SHA-256 of each batch's pixels and labels, and a batch that comes out otherwise
is not written. What is written has equal pixels and labels, not equal bytes: `accuracy.data` reads
it, torchvision's checksums refuse it. Archives may come one by one, in any order.
"""

import argparse
import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ARCHIVES = {
    "cifar10_a.zip": ("data_batch_1", "data_batch_2", "data_batch_3"),
    "cifar10_b.zip": ("data_batch_4", "data_batch_5", "test_batch"),
}
FOLDER = "cifar-10-batches-py"
STRIP = 500
METHOD = 4
"""WebP's effort: more takes minutes and saves less than 1 %."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pixels uint8 [N, 3072], channel by channel, as CIFAR-10's own files have them."""

    pixels: NDArray[np.uint8]
    labels: bytes

    def digest(self) -> str:
        return hashlib.sha256(self.pixels.tobytes() + self.labels).hexdigest()


def read(path: Path) -> Batch:
    with path.open("rb") as file:
        found = pickle.load(file, encoding="bytes")
    return Batch(np.asarray(found[b"data"], dtype=np.uint8), bytes(found[b"labels"]))


def pack(cifar: Path, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    return [_packed(cifar, out / name, batches) for name, batches in ARCHIVES.items()]


def _packed(cifar: Path, path: Path, names: Sequence[str]) -> Path:
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w") as archive:  # WebP is packed already
        for name in names:
            batch = read(cifar / name)
            archive.writestr(f"{name}/labels", batch.labels)
            archive.writestr(f"{name}/sha256", batch.digest())
            for first in range(0, len(batch.pixels), STRIP):
                strip = batch.pixels[first : first + STRIP]
                archive.writestr(f"{name}/{first:06d}.webp", _encoded(strip))
    os.replace(partial, path)
    return path


def _encoded(pixels: NDArray[np.uint8]) -> bytes:
    column = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(-1, 32, 3)
    made = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(column)).save(made, "WEBP", lossless=True, method=METHOD)
    return made.getvalue()


def _decoded(strip: bytes) -> NDArray[np.uint8]:
    column = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
    return column.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).reshape(-1, 3072)


def unpack(data: Path, archives: Sequence[Path]) -> list[str]:
    """The batches that were written."""
    folder = data / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            entries = sorted(archive.namelist())
            for name in sorted({entry.partition("/")[0] for entry in entries}):
                strips = [e for e in entries if e.startswith(f"{name}/") and e.endswith(".webp")]
                pixels = np.concatenate([_decoded(archive.read(strip)) for strip in strips])
                batch = Batch(pixels, archive.read(f"{name}/labels"))
                if batch.digest() != archive.read(f"{name}/sha256").decode():
                    raise SystemExit(
                        f"{path}: {name} does not come out as it went in (another WebP library, or"
                        " a damaged copy): copy the archive again, or pack it anew"
                    )
                _write(folder / name, batch)
                written.append(name)
    return written


def _write(path: Path, batch: Batch) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        pickle.dump({b"data": batch.pixels, b"labels": list(batch.labels)}, file)
    os.replace(partial, path)


def check(first: Path, second: Path) -> list[str]:
    """The batches whose pixels or labels differ, or that are not there."""
    names = [name for batches in ARCHIVES.values() for name in batches]
    return [name for name in names if not _equal(first / name, second / name)]


def _equal(first: Path, second: Path) -> bool:
    if not (first.exists() and second.exists()):
        return False
    ours, theirs = read(first), read(second)
    return np.array_equal(ours.pixels, theirs.pixels) and ours.labels == theirs.labels


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.carried", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", choices=["pack", "unpack", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.what == "pack":
        for path in pack(args.folder, args.others[0]):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    elif args.what == "unpack":
        print(f"written and equal: {', '.join(unpack(args.folder, args.others))}")
    else:
        differing = check(args.folder, args.others[0])
        if differing:
            raise SystemExit(f"not there, or not equal: {', '.join(differing)}")
        print("equal in pixels and labels")


if __name__ == "__main__":
    main()
