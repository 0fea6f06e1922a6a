"""Tiny data of no meaning, the same at every call: pictures, folders, sounds."""

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from surveyed_pipelines.pipeline_case import COUNT


def pixels(number: int, height: int = 40, width: int = 48) -> NDArray[np.uint8]:
    """A smooth picture with some noise, [H, W, 3]."""
    chance = np.random.default_rng(number)
    coarse = chance.integers(0, 256, (5, 6, 3)).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    noisy = np.asarray(smooth).astype(np.int16) + chance.integers(-20, 20, (height, width, 3))
    return noisy.clip(0, 255).astype(np.uint8)


def picture(number: int) -> Image.Image:
    """Pictures have three different sizes."""
    return Image.fromarray(pixels(number, 40 + 4 * (number % 3), 48))


def write_classes(folder: Path, count: int = COUNT) -> None:
    """An ImageFolder with one picture a class, so that the class is the sample's number."""
    for number in range(count):
        inside = folder / "train" / f"class_{number:03d}"
        inside.mkdir(parents=True)
        picture(number).save(inside / "a.jpg")


def write_pictures(folder: Path, count: int = COUNT) -> None:
    """images/NUMBER.jpg and masks/NUMBER.png, of whose pixels none is 0 and all are NUMBER + 1."""
    for name in "images", "masks":
        (folder / name).mkdir(parents=True)
    for number in range(count):
        here = picture(number)
        here.save(folder / "images" / f"{number:03d}.jpg")
        mask = Image.new("L", here.size, number + 1)
        mask.save(folder / "masks" / f"{number:03d}.png")


def write_sound(path: Path, number: int, rate: int = 800) -> None:
    """Sounds have different lengths."""
    values = np.random.default_rng(number).integers(-3000, 3000, 300 + 20 * (number % 7))
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(values.astype("<i2").tobytes())


def nothing(folder: Path) -> None:
    """A pipeline that makes its data in memory needs no files."""
