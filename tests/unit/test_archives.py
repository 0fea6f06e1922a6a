"""Pictures in a tar: what is in it, whose label they have, and that a broken one is told apart."""

import io
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.errors import DecodeError, SourceError
from loaders.sources.archives import picture_tar
from loaders.sources.datasets import picture_folder

SIZE = 16


def jpeg(number: int, size: int = SIZE) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90, subsampling=0)
    return file.getvalue()


def packed(path: Path, files: dict[str, bytes | str], mode: str = "w") -> Path:
    """`{name: bytes}` as a tar; a str is a link to another name."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
                if data.startswith("hard:"):
                    info.type, info.linkname = tarfile.LNKTYPE, data.removeprefix("hard:")
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def labels_of(path: Path) -> dict[str, str]:
    with picture_tar(path, SIZE) as pictures:
        named = zip(pictures.members, pictures.labels, strict=True)
        return {member.name: pictures.classes[label] for member, label in named}


CATS_AND_DOGS: dict[str, bytes | str] = {
    "dog/b.jpg": jpeg(0),
    "cat/a.jpg": jpeg(1),
    "cat/deep/er/c.JPEG": jpeg(2),
    "dog/a.jpg": jpeg(3),
}


def test_a_tar_of_a_folder_has_the_folders_pictures_labels_and_ids(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for name, data in CATS_AND_DOGS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(data, bytes)
        (root / name).write_bytes(data)
    with tarfile.open(tmp_path / "pictures.tar", "w") as tar:
        tar.add(root, arcname=".")
    unpacked = picture_folder(root, SIZE)
    with picture_tar(tmp_path / "pictures.tar", SIZE) as pictures:
        assert len(pictures) == len(unpacked) == 4
        assert pictures.classes == unpacked.classes == ("cat", "dog")
        for mine, theirs in zip(pictures, unpacked, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert mine[1] == theirs[1]
        assert [pictures.read(n) for n in range(4)] == [*map(unpacked.read, range(4))]


@pytest.mark.parametrize("prefix", ["", "./", "train/", "a/b c/", "/abs/"])
def test_the_class_is_the_first_folder_below_the_common_one(prefix: str, tmp_path: Path) -> None:
    files = {prefix + name: data for name, data in CATS_AND_DOGS.items()}
    found = labels_of(packed(tmp_path / "a.tar", files))
    assert sorted(found.values()) == ["cat", "cat", "dog", "dog"]
    assert all(f"{label}/" in name for name, label in found.items())


def test_a_link_stands_for_its_picture(tmp_path: Path) -> None:
    files = {**CATS_AND_DOGS, "dog/link.jpg": "../cat/a.jpg", "dog/hard.jpg": "hard:cat/a.jpg"}
    with picture_tar(packed(tmp_path / "a.tar", files), SIZE) as pictures:
        at = {member.name: n for n, member in enumerate(pictures.members)}
        assert pictures.read(at["dog/link.jpg"]) == pictures.read(at["cat/a.jpg"])
        assert pictures.read(at["dog/hard.jpg"]) == pictures.read(at["cat/a.jpg"])
        assert pictures.classes[pictures.labels[at["dog/link.jpg"]]] == "dog"
    files["dog/lost.jpg"] = "../elsewhere.jpg"
    with pytest.raises(
        SourceError, match=r"dog/lost.jpg is a link to elsewhere.jpg, .*dereference"
    ):
        picture_tar(packed(tmp_path / "b.tar", files), SIZE)


# ---- WebDataset ---------------------------------------------------------------------------------


def beside(labels: dict[str, str]) -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    for number, (key, label) in enumerate(labels.items()):
        files[f"{key}.jpg"] = jpeg(number)
        files[f"{key}.cls"] = label.encode()
    return files


def test_numbers_in_cls_files_are_the_labels_as_they_are(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", beside({"0001": "3", "0002": "0\n", "0003": "3"}))
    with picture_tar(path, SIZE) as pictures:
        assert pictures.labels == [3, 0, 3]
        assert pictures.classes == ("0", "1", "2", "3")


def test_names_in_cls_files_are_classes_in_alphabetical_order(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", beside({"x/2": "dog", "x/1": "cat", "y.5/1.b": "dog"}))
    assert labels_of(path) == {"x/1.jpg": "cat", "x/2.jpg": "dog", "y.5/1.b.jpg": "dog"}


def test_another_picture_of_a_sample_is_no_sample(tmp_path: Path) -> None:
    files = {**beside({"1": "0", "2": "1"}), "1.mask.png": b"x", "1.json": b"{}"}
    assert list(labels_of(packed(tmp_path / "a.tar", files))) == ["1.jpg", "2.jpg"]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({**beside({"1": "0", "2": "1"}), "3.jpg": jpeg(3)}, r"3\.jpg has no 3\.cls beside it"),
        (beside({"1": "0", "2": ""}), r"2\.cls is empty"),
        (beside({"1": "0", "2": "dog"}), r"some \.cls files hold numbers, others words \(dog\)"),
        (beside({"1": "1", "2": "02084071"}), "2084071 in a .cls file is no class's number"),
        (beside({"1": "1", "2": "1"}), "only one class"),
    ],
)
def test_labels_that_are_none_are_refused(
    files: dict[str, bytes | str], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=complaint):
        picture_tar(packed(tmp_path / "a.tar", files), SIZE)


# ---- what is no tar of pictures -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "no pictures in"),
        ({"cat/a.txt": b""}, r"no pictures in .*, but 1 other files: pack pictures as CLASS/NAME"),
        ({"cat/a.jpg": jpeg(0), "cat/b.jpg": jpeg(1)}, r"only one class in .*\('cat'\)"),
        ({"cat/a.jpg": jpeg(0), "cat/b/c.jpg": jpeg(1)}, r"only one class in .*\('cat'\)"),
        ({"a.jpg": jpeg(0), "b.jpg": jpeg(1)}, r"a\.jpg is in no class's folder"),
        ({"cat/a.jpg": jpeg(0), "b.jpg": jpeg(1)}, r"b\.jpg is in no class's folder"),
    ],
)
def test_a_tar_without_pictures_or_classes_is_refused(
    files: dict[str, bytes | str], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=complaint):
        picture_tar(packed(tmp_path / "a.tar", files), SIZE)


@pytest.mark.parametrize(("kind", "what"), [("gz", "gunzip"), ("bz2", "bunzip2"), ("xz", "unxz")])
def test_a_compressed_tar_is_refused_and_says_what_to_do(
    kind: str, what: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / f"a.tar.{kind}", CATS_AND_DOGS, f"w:{kind}")
    with pytest.raises(SourceError, match=rf"is compressed .*\({what}\)"):
        picture_tar(path, SIZE)


@pytest.mark.parametrize("data", [b"", b"no tar" * 300])
def test_what_is_no_tar_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.tar cannot be read as a tar"):
        picture_tar(path, SIZE)
    with pytest.raises(SourceError, match=r"cannot open .*nowhere\.tar: No such file"):
        picture_tar(tmp_path / "nowhere.tar", SIZE)


def test_a_tar_that_was_cut_anywhere_is_refused_or_whole(tmp_path: Path) -> None:
    whole = packed(tmp_path / "whole.tar", CATS_AND_DOGS).read_bytes()
    path = tmp_path / "cut.tar"
    for length in range(0, len(whole), 128):
        path.write_bytes(whole[:length])
        try:
            assert len(labels_of(path)) == 4, length
        except SourceError as error:
            assert str(path) in str(error)


def test_a_header_that_was_overwritten_does_not_end_the_tar(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", CATS_AND_DOGS)
    with tarfile.open(path) as tar:
        third = tar.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[third : third + 512] = b"\x55" * 512
    path.write_bytes(data)
    with pytest.raises(SourceError, match=f"damaged at byte {third}"):
        picture_tar(path, SIZE)


# ---- reading ------------------------------------------------------------------------------------


def many(tmp_path: Path) -> Path:
    files: dict[str, bytes | str] = {f"{'ab'[n % 2]}/{n:03}.jpg": jpeg(n) for n in range(40)}
    return packed(tmp_path / "many.tar", files)


def test_threads_read_at_once_each_its_own_picture(tmp_path: Path) -> None:
    with picture_tar(many(tmp_path), SIZE) as pictures, ThreadPoolExecutor(8) as threads:
        numbers = [int(member.name[2:5]) for member in pictures.members] * 10
        read = threads.map(pictures.read, list(range(40)) * 10)
        assert list(read) == [jpeg(number) for number in numbers]


def test_a_pickled_copy_opens_the_file_again(tmp_path: Path) -> None:
    with picture_tar(many(tmp_path), SIZE) as pictures:
        data = pickle.dumps(pictures)
        first = pictures.read(0)
    with pickle.loads(data) as copy:
        assert copy.read(0) == first
        assert copy.classes == ("a", "b")
    (tmp_path / "many.tar").unlink()
    with pytest.raises(SourceError, match=r"cannot open .*many\.tar"):
        pickle.loads(data)


def test_closing_gives_the_file_back_and_may_be_repeated(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pictures = picture_tar(many(tmp_path), SIZE)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pictures.close()
    pictures.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SourceError, match="is closed"):
        pictures.read(0)
    forgotten = picture_tar(many(tmp_path), SIZE)
    del forgotten
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_became_shorter_and_a_picture_that_is_none_are_named(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", {"cat/a.jpg": jpeg(0), "dog/b.jpg": b"nothing"})
    with picture_tar(path, SIZE) as pictures:
        with pytest.raises(DecodeError, match=r"cannot decode picture .*a\.tar:dog/b\.jpg"):
            pictures[1]
        os.truncate(path, 700)
        with pytest.raises(DecodeError, match=r"a\.tar:cat/a\.jpg: 188 of \d+ bytes are there"):
            pictures[0]


# ---- what is read, and what is not --------------------------------------------------------------


def picture(number: int, kind: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


KINDS = {
    ".jpg": "JPEG", ".JPEG": "JPEG", ".jfif": "JPEG", ".Png": "PNG", ".webp": "WEBP",
    ".BMP": "BMP", ".gif": "GIF", ".tif": "TIFF", ".TIFF": "TIFF", ".ppm": "PPM",
}  # fmt: skip
MIXED: dict[str, bytes | str] = {
    **{f"cat/{n}{suffix}": picture(n, kind) for n, (suffix, kind) in enumerate(KINDS.items())},
    "dog/a.jpg": jpeg(1),
    "dog/deep/b.webp": picture(2, "WEBP"),
    "dog/notes.txt": b"x",
    "dog/deep/c.heic": b"x",
    "dog/d.txt": b"x",
    "dog/README": b"x",
    "dog/.DS_Store": b"x",
    "cat/._a.jpg": b"x",
    "cat/Thumbs.db": b"x",
}


def unpacked(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(data, bytes)
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("source", ["folder", "tar"])
def test_all_pictures_that_pillow_reads_are_read_and_the_rest_is_counted_in_one_line(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened: Any
    if source == "tar":
        opened = picture_tar(packed(tmp_path / "a.tar", MIXED), SIZE)
    else:
        opened = picture_folder(unpacked(tmp_path / "a", MIXED), SIZE)
    assert list(opened.labels) == [0] * len(KINDS) + [1] * 2
    assert all(opened[n][0].shape == (3, SIZE, SIZE) for n in range(len(opened)))
    if source == "tar":
        opened.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "files that do not end as pictures do (4: 2 .txt" in line
    assert "1 .heic" in line and "1 no suffix" in line and "DS_Store" not in line


def test_a_folder_tells_pictures_without_a_class_and_classes_without_pictures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = unpacked(tmp_path / "a", {**CATS_AND_DOGS, "lost.webp": b"x", "list.csv": b"x"})
    (root / "emu").mkdir()
    files = picture_folder(root, SIZE)
    assert (len(files), files.classes) == (4, ("cat", "dog", "emu"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"pictures that lie in no class's folder (1; the first is {root}/lost.webp)" in line
    assert "the classes without a picture emu" in line
