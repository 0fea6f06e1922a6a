"""Pictures in one uncompressed .tar, which is read in place and never unpacked.

    cat/1.jpg | cat/2.jpg | dog/1.jpg | ...      label: the first folder below the common one
    0001.jpg  | 0001.cls  | 0002.jpg  | ...      label: what the .cls beside it says (WebDataset)

A member is read with `pread`, so any number of threads and forked processes may read. A pickled
copy opens the file again. A tar of a folder has the ids of the folder.
"""

import os
import posixpath
import tarfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch

from loaders.closing import ClosedAtEnd
from loaders.errors import DecodeError, SourceError
from loaders.pixels.decoding import ANYWHERE, PictureDecoder, Room
from loaders.sources.datasets import PICTURE_SUFFIXES, is_picture, log_unread_files

LABEL_SUFFIX = ".cls"
MOST_CLASSES = 100_000
"""A larger number is not the number of a class, but probably its name."""
AGAIN = "make or copy it again"
COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
)


@dataclass(frozen=True, slots=True)
class TarMember:
    """Where a file lies in a tar."""

    name: str
    offset: int
    size: int


@dataclass(eq=False, repr=False)
class PictureTar(ClosedAtEnd):
    """The pictures in a tar. They are decoded when they are asked for."""

    path: Path
    members: Sequence[TarMember]
    labels: Sequence[int]
    classes: tuple[str, ...]
    decoder: PictureDecoder

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read_into(index)

    def read_into(self, index: int, room: Room = ANYWHERE) -> tuple[torch.Tensor, int]:
        """Sample `index`, with its pixels in the memory of `room` where that saves a copy."""
        return self.decoder.decode(self.read(index), self.name_of(index), room), self.labels[index]

    def name_of(self, index: int) -> str:
        """The name of sample `index` in errors."""
        return f"{self.path}:{self.members[index].name}"

    def read(self, index: int) -> bytes:
        """The file of sample `index`, as it is in the tar."""
        if not self._closer.alive:
            raise SourceError(f"{self.path} is closed: open it again to read from it")
        member = self.members[index]
        data = os.pread(self._descriptor, member.size, member.offset)
        if len(data) != member.size:
            raise DecodeError(
                f"cannot read picture {self.name_of(index)}: {len(data)} of {member.size} bytes"
                f" are there; the file has become shorter since it was opened: {AGAIN}"
            )
        return data

    def close(self) -> None:
        """Close the file, if it is open. That is also done when this object is freed."""
        self._closer()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the file descriptor, which is not valid in another process."""
        return {name: v for name, v in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __post_init__(self) -> None:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise SourceError(
                f"cannot open {self.path}: {error.strerror}; give a .tar file"
            ) from error
        self._closer = weakref.finalize(self, os.close, self._descriptor)


def picture_tar(
    path: Path,
    size: int | None = None,
    square: bool = True,
    *,
    exif: bool = True,
    pixel_limit: int | None = None,
) -> PictureTar:
    """The pictures in a tar. The arguments are those of `picture_folder`."""
    decoder = PictureDecoder(size, square, exif, pixel_limit)
    members = _index(path)
    pictures = [m for m in members if is_picture(m.name)]
    others = [m.name for m in members if not is_picture(m.name) and not _is_label(m.name)]
    if not pictures:
        raise SourceError(
            f"there are no pictures in {path}, but {len(members)} other files: pack pictures as"
            f" CLASS/NAME{'|'.join(PICTURE_SUFFIXES)}"
        )
    pictures.sort(key=lambda member: member.name.split("/"))
    sidecars = {_stem(m.name): m for m in members if _is_label(m.name)}
    if sidecars:
        pictures = [m for m in pictures if _is_whole_sample(path, m.name, sidecars)]
        labels, classes = _numbered(path, _words_beside(path, pictures, sidecars))
    else:
        labels, classes = _named(_folders(path, pictures))
    if len(set(labels)) == 1:
        raise SourceError(
            f"there is only one class in {path} ('{classes[labels[0]]}'): pack at least two, as"
            f" folders or in {LABEL_SUFFIX} files"
        )
    log_unread_files(path, others)
    return PictureTar(path, pictures, labels, classes, decoder)


def _is_label(name: str) -> bool:
    return name.endswith(LABEL_SUFFIX)


def _index(path: Path) -> list[TarMember]:
    """The files in a tar. A link counts as the file that it points to."""
    _check(path)
    files: dict[str, TarMember] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            while (info := tar.next()) is not None:
                # tarfile keeps every header that it has read: a kilobyte for each picture.
                cast(Any, tar).members = []
                name = posixpath.normpath(info.name)
                if posixpath.basename(name).startswith("._"):
                    continue  # macOS puts such a file beside each file, with the same suffix
                if info.isreg() and not info.issparse():
                    files[name] = TarMember(name, info.offset_data, info.size)
                elif info.islnk():
                    links[name] = posixpath.normpath(info.linkname)
                elif info.issym():
                    beside = posixpath.join(posixpath.dirname(name), info.linkname)
                    links[name] = posixpath.normpath(beside)
            end = tar.offset
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SourceError(f"{path} cannot be read as a tar: {error}; {AGAIN}") from error
    _check_end(path, end)
    for name, target in links.items():
        if target in files:
            files[name] = TarMember(name, files[target].offset, files[target].size)
        elif is_picture(name) or _is_label(name):
            raise SourceError(
                f"{path}: {name} is a link to {target}, which is no file in the tar: pack with"
                " tar --dereference"
            )
    return list(files.values())


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise SourceError(f"cannot open {path}: {error.strerror}; give a .tar file") from error
    for magic, kind, command in COMPRESSED:
        if head.startswith(magic):
            raise SourceError(
                f"{path} is compressed ({kind}), so pictures cannot be read where they lie:"
                f" uncompress it once ({command}); compression makes JPEGs hardly smaller"
            )


def _check_end(path: Path, end: int) -> None:
    """Check that a tar ends in a block of zeros: tarfile also stops at an unreadable header."""
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        what = "damaged" if len(block) == tarfile.BLOCKSIZE else "truncated"
        raise SourceError(f"{path} is {what} at byte {end}: {AGAIN}")


def _folders(path: Path, pictures: Sequence[TarMember]) -> list[str]:
    """The first folder of each name below the folder that all of them are in."""
    folders = [member.name.split("/")[:-1] for member in pictures]
    ends = zip(min(folders), max(folders), strict=False)
    common = len(list(takewhile(lambda both: both[0] == both[1], ends)))
    if common == min(len(folder) for folder in folders):
        common = max(common - 1, 0)  # this folder holds pictures, so it is a class itself
    for member, folder in zip(pictures, folders, strict=True):
        if len(folder) <= common:
            raise SourceError(
                f"{path}: {member.name} is in no class's folder: pack it as"
                f" CLASS/NAME{'|'.join(PICTURE_SUFFIXES)}, or with a NAME{LABEL_SUFFIX} beside it"
            )
    return [folder[common] for folder in folders]


def _is_whole_sample(path: Path, name: str, sidecars: Mapping[str, TarMember]) -> bool:
    """Whether a picture has its own label. (x.mask.png has none: it is a part of sample x.)"""
    if _stem(name) in sidecars:
        return True
    folder, file = posixpath.split(name)
    if posixpath.join(folder, file.split(".", 1)[0]) in sidecars:
        return False
    raise SourceError(
        f"{path}: {name} has no {_stem(name)}{LABEL_SUFFIX} beside it, but others have: add it, or"
        " take the picture out"
    )


def _words_beside(
    path: Path, pictures: Sequence[TarMember], sidecars: Mapping[str, TarMember]
) -> list[str]:
    """The words in the label file of each picture."""
    words: list[str] = []
    with path.open("rb") as file:
        for picture in pictures:
            beside = sidecars[_stem(picture.name)]
            file.seek(beside.offset)
            words.append(file.read(beside.size).decode("utf-8", "replace").strip())
            if not words[-1]:
                raise SourceError(f"{path}: {beside.name} is empty: write the class into it")
    return words


def _numbered(path: Path, words: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Labels and classes. Numbers are labels; other words name classes, in alphabetical order."""
    names = sorted({word for word in words if not word.isdecimal()})
    if len(names) == len(set(words)):
        return _named(words)
    if names:
        raise SourceError(
            f"{path}: some {LABEL_SUFFIX} files hold numbers, others words"
            f" ({', '.join(names[:3])}): number the classes from 0, or name them, in all of them"
        )
    labels = [int(word) for word in words]
    if max(labels) >= MOST_CLASSES:
        raise SourceError(
            f"{path}: {max(labels)} in a {LABEL_SUFFIX} file is no class's number: number the"
            " classes from 0, or name them"
        )
    return labels, tuple(str(label) for label in range(max(labels) + 1))


def _named(words: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    classes = sorted(set(words))
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[word] for word in words], tuple(classes)


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
