"""What DALI does beside the laws of every backend: tars, kinds of pictures, bad files, a GPU."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support import backend_sources
from support.backend_sources import (
    COUNT,
    ROUNDING,
    SIDE,
    Open,
    difference,
    loader,
    need,
    portrait,
    save,
)
from support.fake_gpu import not_on_a_fake_gpu

from loaders.backends import open_source
from loaders.errors import DecodeError
from loaders.sources.datasets import picture_folder

pictures, opened = backend_sources.pictures, backend_sources.opened


# ---- what goes wrong ----------------------------------------------------------------------------

BAD = 13


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:120]),
        lambda path: path.write_text("I am no picture\n" * 20),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "text", "removed", "folder"],
)
def test_dali_names_the_one_bad_file_among_many_good_ones(
    damage: Callable[[Path], object], opened: Open, tmp_path: Path
) -> None:
    for number in range(12):
        save(tmp_path / "p" / ("cat" if number < 6 else "dog") / f"{number:02}.jpg", number)
    source = opened("dali", tmp_path / "p")
    bad = Path(source.files.paths[7])
    damage(bad)
    with pytest.raises(DecodeError) as error:
        source.__getitems__(range(12))
    assert str(error.value).startswith(f"cannot decode picture {bad}: ")
    assert "repair the file or remove it" in str(error.value)
    assert "nvImageCodec" not in str(error.value), "a number is no reason"
    assert len(source.__getitems__([0, 1, 11])) == 3


def test_dali_keeps_a_pipeline_a_worker_and_closing_ends_their_threads(
    opened: Open, pictures: Path
) -> None:
    source = opened("dali", pictures)
    list(loader(source, workers=2))
    running = threads_of_this_process()
    source.close()
    assert threads_of_this_process() < running


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_dali_decodes_a_tar_as_it_decodes_the_folder_that_is_in_it(
    opened: Open, pictures: Path, tmp_path: Path
) -> None:
    folder = opened("dali", pictures)
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(pictures, arcname=".")
    source = open_source(tmp_path / "p.tar", "dali", size=SIDE)
    assert list(source.labels) == list(folder.labels)
    assert source.classes == folder.classes
    for (mine, _), (other, _) in zip(
        source.__getitems__(range(COUNT)), folder.__getitems__(range(COUNT)), strict=True
    ):
        assert torch.equal(mine, other)
    member = source.files.members[BAD]
    with (tmp_path / "p.tar").open("r+b") as file:
        file.seek(member.offset + member.size - 30)
        file.write(bytes(30))
    with pytest.raises(DecodeError, match=rf"p\.tar:.*{Path(member.name).name}"):
        source.__getitems__(range(COUNT))
    assert torch.equal(source[0][0], folder[0][0])


# ---- DALI decodes what the native decoder decodes -----------------------------------------------


def encode(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_dali_sees_the_same_pixels_in_every_kind_of_picture(opened: Open, tmp_path: Path) -> None:
    picture, turned = Image.fromarray(portrait(1)), Image.Exif()
    turned[0x0112] = 6  # a camera that was held on its side
    kinds = {
        "a.jpg": encode(picture, "JPEG"),
        "b.jpg": encode(picture, "JPEG", progressive=1),
        "c.jpg": encode(picture, "JPEG", subsampling=0),
        "d.jpg": encode(picture.convert("L"), "JPEG"),
        "e.jpg": encode(picture.convert("CMYK"), "JPEG"),
        "f.jpg": encode(picture, "JPEG", exif=turned),
        "g.png": encode(picture, "PNG"),
        "h.png": encode(picture.convert("RGBA"), "PNG"),
        "i.png": encode(picture.convert("L"), "PNG"),
        "j.png": encode(picture.convert("P"), "PNG"),
        "k.png": encode(picture.convert("1"), "PNG"),
    }
    for name, data in kinds.items():
        (tmp_path / "p" / name[0]).mkdir(parents=True)
        (tmp_path / "p" / name[0] / name).write_bytes(data)
    source = opened("dali", tmp_path / "p")
    for i in range(len(kinds)):
        assert torch.equal(source[i][0], source.files[i][0]), source.files.paths[i]


@pytest.mark.parametrize(("height", "width"), [(40, 60), (90, 33), (32, 31), (20, 20)])
def test_dali_resizes_to_the_same_middle_square(
    height: int, width: int, opened: Open, tmp_path: Path
) -> None:
    save(tmp_path / "p" / "a" / "0.jpg", 1, height, width)
    save(tmp_path / "p" / "b" / "1.jpg", 2, width, height)
    source = opened("dali", tmp_path / "p")
    for i in range(2):
        assert source[i][0].shape == (3, SIDE, SIDE)
        assert difference(source[i][0], source.files[i][0]) < 0.7


@pytest.mark.gpu
@not_on_a_fake_gpu("DALI's compiled kernels")
@pytest.mark.parametrize("size", [SIDE, 224])
def test_dali_decodes_on_a_gpu_what_it_decodes_on_the_cpu(size: int, tmp_path: Path) -> None:
    need("dali")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    from loaders.backends.dali import DaliPictures

    for number in range(6):
        save(tmp_path / "p" / ("a" if number < 3 else "b") / f"{number}.jpg", number, 240, 300)
    files = picture_folder(tmp_path / "p", size)
    source = DaliPictures(files, device_id=0)
    for batch in (range(6), [0], [5, 1, 3]):
        for i, (picture, label) in zip(batch, source.__getitems__(batch), strict=True):
            assert picture.device.type == "cpu"
            assert difference(picture, files[i][0]) < ROUNDING
            assert label == files[i][1]
    bad = Path(files.paths[4])
    bad.write_bytes(bad.read_bytes()[:-400])
    with pytest.raises(DecodeError, match=bad.name):
        source.__getitems__(range(6))
    assert difference(source[5][0], files[5][0]) < ROUNDING
    source.close()
