"""Draws ten classes of camera-sized JPEG pictures, so that the demo needs no download.

    python examples/make_pictures.py FOLDER     ->  FOLDER/train/CLASS/*.jpg, FOLDER/val/CLASS/*.jpg

A picture shows one shape, of random colour, size, place and turn, on a random background with
clutter. The class is the shape, and easy to learn. Training pictures have 1280x960 pixels and
sensor noise: decoding one takes several milliseconds, as for a photo, so training waits for it.
Test pictures are the same scenes before they are enlarged. They are cheap, so there are many.
"""

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console

WIDTH, HEIGHT = 1280, 960
SKETCH = 480, 360  # shapes are drawn at this size and enlarged: it is quick, and edges are soft
MAX_TURN = 0.4  # radians
TRAIN_A_CLASS, VAL_A_CLASS = 80, 240
NOISE = np.tile(
    np.random.default_rng(1).normal(0, 9, (HEIGHT, WIDTH, 3)).astype(np.int16), (1, 2, 1)
)  # twice as wide as a picture, which takes it from a random column on

Point = tuple[float, float]
Shape = Callable[[ImageDraw.ImageDraw, float, float, float, float, tuple[int, ...]], None]
Draw = Callable[[Shape, np.random.Generator], Image.Image]


def polygon(corners: Sequence[Point]) -> Shape:
    """Return a shape with these corners, in units of its radius. It is turned by `angle`."""

    def draw(
        pen: ImageDraw.ImageDraw,
        x: float,
        y: float,
        radius: float,
        angle: float,
        colour: tuple[int, ...],
    ) -> None:
        cos, sin = math.cos(angle) * radius, math.sin(angle) * radius
        pen.polygon([(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in corners], colour)

    return draw


def star(points: int, inner: float) -> list[Point]:
    turns = [math.pi * k / points for k in range(2 * points)]
    radii = [1.0 if k % 2 == 0 else inner for k in range(2 * points)]
    return [(r * math.cos(t), r * math.sin(t)) for r, t in zip(radii, turns, strict=True)]


def disc(
    pen: ImageDraw.ImageDraw, x: float, y: float, r: float, _: float, colour: tuple[int, ...]
) -> None:
    pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def ring(
    pen: ImageDraw.ImageDraw, x: float, y: float, r: float, _: float, colour: tuple[int, ...]
) -> None:
    pen.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=max(2, round(r * 0.3)))


def pair(
    pen: ImageDraw.ImageDraw, x: float, y: float, r: float, angle: float, colour: tuple[int, ...]
) -> None:
    dx, dy = 0.6 * r * math.cos(angle), 0.6 * r * math.sin(angle)
    for side in (-1, 1):
        disc(pen, x + side * dx, y + side * dy, 0.42 * r, 0, colour)


CROSS = [
    (0.3, 1), (0.3, 0.3), (1, 0.3), (1, -0.3), (0.3, -0.3), (0.3, -1),
    (-0.3, -1), (-0.3, -0.3), (-1, -0.3), (-1, 0.3), (-0.3, 0.3), (-0.3, 1),
]  # fmt: skip
SHAPES: dict[str, Shape] = {
    "bar": polygon([(1, 0.2), (1, -0.2), (-1, -0.2), (-1, 0.2)]),
    "cross": polygon(CROSS),
    "disc": disc,
    "ell": polygon([(-0.7, -0.9), (-0.1, -0.9), (-0.1, 0.4), (0.8, 0.4), (0.8, 0.9), (-0.7, 0.9)]),
    "half": polygon([(math.cos(t / 20), math.sin(t / 20)) for t in range(63)]),
    "pair": pair,
    "ring": ring,
    "square": polygon([(0.8, 0.8), (0.8, -0.8), (-0.8, -0.8), (-0.8, 0.8)]),
    "star": polygon(star(5, 0.4)),
    "triangle": polygon([(1, 0), (-0.5, 0.87), (-0.5, -0.87)]),
}


def sketch(shape: Shape, rng: np.random.Generator) -> Image.Image:
    width, height = SKETCH
    corners = rng.integers(70, 186, (3, 4, 3), dtype=np.uint8)  # a smooth, muted background
    picture = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        disc(pen, x, y, rng.uniform(2, 7), 0, tuple(rng.integers(0, 256, 3).tolist()))
    radius = rng.uniform(0.24, 0.36) * height
    x, y = width / 2 + rng.uniform(-0.12, 0.12) * height, height * rng.uniform(0.38, 0.62)
    behind = np.asarray(picture)[int(y), int(x)].astype(int)
    colour = tuple(int(c) for c in np.where(behind > 127, behind - 100, behind + 100))
    shape(pen, x, y, radius, rng.uniform(-MAX_TURN, MAX_TURN), colour)
    return picture


def photo(shape: Shape, rng: np.random.Generator) -> Image.Image:
    large = np.asarray(sketch(shape, rng).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
    begin = int(rng.integers(WIDTH))
    pixels = np.add(large, NOISE[:, begin : begin + WIDTH], dtype=np.int16)
    np.clip(pixels, 0, 255, out=pixels)
    return Image.fromarray(pixels.astype(np.uint8))


def make(root: Path, train: int = TRAIN_A_CLASS, val: int = VAL_A_CLASS) -> int:
    """Draw the pictures that are missing under `root`, so many of each class. Return how many there
    are in all."""
    jobs = [
        (root / split / name / f"{number:04d}.jpg", draw, shape)
        for split, draw, count in (("train", photo, train), ("val", sketch, val))
        for name, shape in SHAPES.items()
        for number in range(count)
    ]

    def work(job: tuple[Path, Draw, Shape]) -> None:
        path, draw, shape = job
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            seed = zlib.crc32("/".join(path.parts[-3:]).encode())  # a picture is always the same
            part = path.with_suffix(".part")
            picture = np.asarray(draw(shape, np.random.default_rng(seed)))
            Image.fromarray(picture).save(part, "JPEG", quality=90)
            part.rename(path)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, jobs))
    return len(jobs)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/make_pictures.py FOLDER")
    console = Console(stderr=True)
    with console.status("drawing pictures"):
        total = make(Path(sys.argv[1]))
    console.print(f"{total} pictures in {sys.argv[1]}", highlight=False)
