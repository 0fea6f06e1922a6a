"""Pictures on disk: which there are, longer passes by links, and made-up ones for smoke runs."""

import os
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10 = "cifar-10-batches-py"
SUFFIXES = {".jpg", ".jpeg"}


def listing(folder: Path) -> tuple[list[Path], list[int]]:
    """(paths, labels) of folder/CLASS/*.jpg: the same ones in the same order for every peer."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(sorted(e.name for e in folder.iterdir() if e.is_dir())):
        found = sorted(p for p in (folder / name).iterdir() if p.suffix.lower() in SUFFIXES)
        paths += found
        labels += [label] * len(found)
    return paths, labels


def repeat(folder: Path, pictures: int, into: Path) -> Path:
    """A folder of exactly so many: links to the same files again and again. A pass over a few
    hundred files would measure how a loader starts a pass."""
    paths, _ = listing(folder)
    if not paths:
        raise SystemExit(f"no pictures under {folder}: expected CLASS/*.jpg")
    for number in range(pictures):
        # Spread over the classes if there are more files than wanted.
        source = paths[number * len(paths) // pictures if pictures < len(paths) else
                       number % len(paths)]  # fmt: skip
        place = into / source.parent.name
        place.mkdir(parents=True, exist_ok=True)
        os.symlink(source.resolve(), place / f"{number:06d}{source.suffix}")
    return into


def enlarged(folder: Path, pictures: int, into: Path) -> Path:
    """Pictures of 1920x1440, each of four photos side by side."""
    paths, _ = listing(folder)
    for number in range(pictures):
        made = Image.new("RGB", (1920, 1440))
        for tile in range(4):
            with Image.open(paths[(4 * number + tile) % len(paths)]) as photo:
                part = photo.convert("RGB").resize((960, 720))
                made.paste(part, (960 * (tile % 2), 720 * (tile // 2)))
        place = into / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        made.save(place / f"{number:04d}.jpg", quality=90)
    return into


def made_up_photos(into: Path, pictures: int) -> Path:
    rng = np.random.default_rng(0)
    for number in range(pictures):
        place = into / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12 + number % 3, 16, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(place / f"{number:03d}.jpg")
    return into


def made_up_cifar10(into: Path, pictures: int) -> Path:
    rng = np.random.default_rng(0)
    (into / CIFAR10).mkdir(parents=True, exist_ok=True)
    for number in range(1, 6):
        data = rng.integers(0, 256, (pictures // 5, 3072), np.uint8)
        batch = {b"data": data, b"labels": rng.integers(0, 10, len(data)).tolist()}
        (into / CIFAR10 / f"data_batch_{number}").write_bytes(pickle.dumps(batch))
    return into


def cifar10(folder: Path, pictures: int) -> tuple[np.ndarray, np.ndarray]:
    """The first so many training pictures, uint8 [N, 32, 32, 3], and their labels."""
    batches = []
    for number in range(1, 6):
        file = folder / CIFAR10 / f"data_batch_{number}"
        batches.append(pickle.loads(file.read_bytes(), encoding="bytes"))
    pixels = np.concatenate([batch[b"data"] for batch in batches])[:pictures]
    labels = np.concatenate([batch[b"labels"] for batch in batches])[:pictures]
    pixels = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), labels.astype(np.int64)
