"""Pictures on disk: which there are, longer passes by links, and made-up ones for smoke runs."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

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
