"""A .beton file: FFCV's and ours, whole, damaged and foreign."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.backend_sources import COUNT, difference, need, portrait

from loaders.backends import open_source
from loaders.backends.beton import Encoding, Mode, convert
from loaders.errors import DecodeError, SourceError
from loaders.sources.datasets import PictureArrays


@pytest.fixture(autouse=True)
def ffcv() -> None:
    need("ffcv")


@pytest.fixture
def native() -> PictureArrays:
    pixels = np.stack([portrait(number) for number in range(COUNT)])
    return PictureArrays(pixels, np.arange(COUNT) % 3, ("a", "b", "c"))


@pytest.fixture
def jpg(native: PictureArrays, tmp_path: Path) -> Path:
    return write(native, tmp_path / "jpg.beton", "jpg")


@pytest.fixture
def raw(native: PictureArrays, tmp_path: Path) -> Path:
    return write(native, tmp_path / "raw.beton", "raw")


def write(source: PictureArrays, path: Path, mode: Mode) -> Path:
    convert(source, path, Encoding(mode, quality=100 if mode == "jpg" else None), workers=2)
    return path


def test_a_beton_that_is_closed_or_forgotten_holds_no_file(jpg: Path) -> None:
    source = open_source(jpg, "ffcv")

    def holders() -> int:
        fds = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
        return sum(fd.exists() and fd.readlink() == source.path for fd in fds)

    other = open_source(source.path, "ffcv")
    assert holders() == 2
    del other
    assert holders() == 1
    source.close()
    assert holders() == 0
    with pytest.raises(SourceError, match="was closed"):
        source[0]


def test_raw_pictures_of_a_beton_are_the_pixels_to_the_byte(
    native: PictureArrays, raw: Path
) -> None:
    source = open_source(raw, "ffcv")
    assert all(torch.equal(source[i][0], native[i][0]) for i in range(COUNT))


@pytest.mark.parametrize("mode", ["jpg", "raw"])
def test_a_beton_that_ffcv_wrote_itself_is_read(
    mode: str, native: PictureArrays, tmp_path: Path
) -> None:
    pytest.importorskip("ffcv.writer")
    # Its writer forks, and a fork of this process, which has threads, may hang.
    script = """
import sys
import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
kept = np.load(sys.argv[1])
samples = [(int(label), kept[f"picture{i}"]) for i, label in enumerate(kept["labels"])]
# The order of the fields is the writer's to choose, and so is that of the pages.
fields = {"label": IntField(), "image": RGBImageField(write_mode=sys.argv[3], jpeg_quality=98)}
DatasetWriter(sys.argv[2], fields, num_workers=2).from_indexed_dataset(samples, chunksize=3)
"""
    pictures = {f"picture{i}": native[i][0].permute(1, 2, 0).numpy() for i in range(COUNT)}
    kept, path = tmp_path / "samples.npz", tmp_path / "theirs.beton"
    np.savez(kept, labels=[native[i][1] for i in range(COUNT)], **pictures)
    command = [sys.executable, "-c", script, str(kept), str(path), mode]
    subprocess.run(command, check=True)
    source = open_source(path, "ffcv")
    assert len(source) == COUNT
    for i in range(COUNT):
        assert source[i][1] == native[i][1]
        assert difference(source[i][0], native[i][0]) < 2


def test_ffcvs_own_loader_reads_a_beton_of_ours(jpg: Path) -> None:
    script = """
import sys
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
for os_cache in (True, False):
    pipelines = {"image": [SimpleRGBImageDecoder()], "label": [IntDecoder()]}
    made = Loader(sys.argv[1], 11, 1, os_cache, OrderOption.SEQUENTIAL, pipelines=pipelines)
    print([int(x) for _, labels in made for x in labels[:, 0]])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(jpg)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(open_source(jpg, "ffcv").labels)] * 2


def test_a_file_that_is_no_beton_says_so(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"PK\x03\x04 no beton " * 90), ("c", b"\x02" * 90)):
        path = tmp_path / f"{name}.beton"
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"no \.beton file|cut off") as error:
            open_source(path, "ffcv")
        assert str(path) in str(error.value)
    with pytest.raises(SourceError, match="no file"):
        open_source(tmp_path / "missing.beton", "ffcv")


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_beton_whose_end_is_missing_is_refused_at_once(share: float, raw: Path) -> None:
    data = raw.read_bytes()
    raw.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SourceError, match=r"cut off|no \.beton file"):
        open_source(raw, "ffcv")


def test_a_beton_that_shrinks_while_it_is_open_is_an_error_and_no_crash(raw: Path) -> None:
    source = open_source(raw, "ffcv")
    os.truncate(raw, raw.stat().st_size // 2)
    with pytest.raises(DecodeError, match=rf"sample {COUNT - 1} of .*bytes too early"):
        source[COUNT - 1]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("names", "missing"),
    [(("photo", "label"), "'image' of type RGB"), (("image", "y"), "'label' of type Int")],
)
def test_a_beton_without_pictures_and_labels_says_what_it_has(
    names: tuple[str, str], missing: str, tmp_path: Path
) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    path = tmp_path / "other.beton"
    fields = dict(zip(names, (RGBImageField(), IntField()), strict=True))
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset([(portrait(1), 1)] * 3)
    with pytest.raises(SourceError, match=missing) as error:
        open_source(path, "ffcv")
    assert f"{names[0]}: RGBImageField, {names[1]}: IntField" in str(error.value)
