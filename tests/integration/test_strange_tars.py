"""Tars that a stranger packed: a name is only a name, and a damaged one is refused by its place."""

import io
import random
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from loaders.errors import DecodeError, SourceError
from loaders.streams.shard_files import KEY, ShardAccess, ShardFile, TarSample, tar_samples
from loaders.streams.stream_pass import StreamTurn
from loaders.streams.tar_shards import TarShards

FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
KINDS = {
    "device": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE, "folder": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE,
}  # fmt: skip


def packed(path: Path, names: list[str], form: int, kind: bytes = tarfile.REGTYPE) -> Path:
    """A tar with a member of this kind for each name, and the file good.txt."""
    with tarfile.open(path, "w", format=form, errors="surrogateescape") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"odd"))
        info = tarfile.TarInfo("good.txt")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"good"))
    return path


def read(path: Path) -> list[TarSample]:
    with closing(ShardFile(str(path), ShardAccess(1, 0, {}), 0, None)) as file:
        return [*tar_samples(file, lambda: True)]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("", None), (".", None), ("..", None), (".txt", None), ("/", None)),
        *(("/etc/a.txt", "/etc/a"), ("../../a.txt", "../../a"), ("./b/../a.txt", "a")),
        *(("x" * 250 + ".txt", "x" * 250), ("x/" * 5000 + "a.txt", "x/" * 5000 + "a")),
        *(("\udcff\udcfe.txt", "\udcff\udcfe"), ("\x1b[2J\n.txt", "\x1b[2J\n")),
        *(("<script>.txt", "<script>"), ("a.", "a"), ("a..txt", "a"), ("a", "a")),
    ],
    ids=ascii,
)
def test_a_name_of_a_member_is_only_a_name(
    name: str, key: str | None, form: int, tmp_path: Path
) -> None:
    found = {one.key: one.files for one in read(packed(tmp_path / "a.tar", [name], form))}
    assert found.pop("good") == {"txt": b"good"}
    assert [*found] == ([] if key is None else [key])
    assert all([*files.values()] == [b"odd"] for files in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_is_no_file_is_left_out_and_no_link_is_followed(
    kind: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / "a.tar", ["odd.txt"], tarfile.PAX_FORMAT, KINDS[kind])
    if "link" in kind:
        with pytest.raises(SourceError, match=r"odd.txt is a link to /etc/passwd"):
            read(path)
    else:
        assert [one.key for one in read(path)] == ["good"]


@pytest.mark.parametrize("names", [["a.txt", "a.txt"], ["a.txt", "./a.TXT"]])
def test_a_name_that_comes_twice_is_refused(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"comes twice \(at byte 1024\)"):
        read(packed(tmp_path / "a.tar", names, tarfile.PAX_FORMAT))


def test_no_member_takes_the_place_of_the_samples_name(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", [f"a.{KEY}", "a.txt"], tarfile.PAX_FORMAT)
    shards = TarShards(path, decode=dict)
    with closing(shards.begin(StreamTurn(0, 0, False, 0, 1))) as reading:
        assert [sample.data[KEY] for sample in reading] == ["a", "good"]


NUMBERS = [(2**96 - n).to_bytes(12, "big") for n in (1, 600, 1024, 5120)]
PIECES = [
    *(*NUMBERS, b"\x80" + b"\x7f" * 11, b"9" * 11 + b" ", b"-1", b"\xff", b"\0", b"x", b"g", b"L"),
    *(b"K", b"S", b"1", b"5", b"11 size=-5\n", b"20 size=1e999\n", b"18 size=99999999999\n"),
    *(b"27 GNU.sparse.map=0,1,x\n", b"30 GNU.sparse.major=1\n", b"99 path="),
]
PLACES = [0, 5, 100, 124, 124, 124, 136, 156, 156, 157, 257, 329, 345, 386, 482]


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """The tar with pieces in its headers, whose sums are right again in most cases."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(0, len(data) // 512) * 512 + rng.choice(PLACES)
        piece = rng.choice(PIECES)
        data[at : at + len(piece)] = piece
    return summed(data) if rng.random() < 0.9 else bytes(data)


def summed(data: bytearray) -> bytes:
    """The tar with the right sum in each header."""
    for at in range(0, len(data) - 511, 512):
        block = data[at : at + 512]
        if block[257:262] == b"ustar":
            total = 256 + sum(block[:148]) + sum(block[156:])
            data[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(data)


@pytest.mark.parametrize("size", NUMBERS[1:], ids=bytes.hex)
def test_a_size_below_nothing_leads_to_no_byte_that_was_read(size: bytes, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar", ["a.txt", "b.txt"], tarfile.GNU_FORMAT)
    data = bytearray(path.read_bytes())
    data[1024 + 124 : 1024 + 136] = size
    for kind in (tarfile.REGTYPE, b"Z"):  # The latter is skipped, and not read.
        data[1024 + 156 : 1024 + 157] = kind
        path.write_bytes(summed(data))
        with pytest.raises((SourceError, DecodeError), match=r"a\.tar"):
            read(path)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_damaged_tar_is_read_or_refused_by_its_place(form: int, tmp_path: Path) -> None:
    names = ["a.txt", "ä" * 90 + ".txt", "x" * 200 + ".jpg", "c.txt"]
    whole = packed(tmp_path / "a.tar", names, form).read_bytes()
    path, refused = tmp_path / "damaged.tar", 0
    for seed in range(700):
        path.write_bytes(damaged(whole, random.Random(seed)))
        try:
            read(path)
        except (SourceError, DecodeError) as error:
            refused += str(path) in str(error)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert refused > 100
