"""`python -m loaders.convert`: what it writes, and what it says to bad input."""

import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.convert import main
from loaders.errors import BackendMissing
from loaders.sources.datasets import PictureArrays

COLOURS = [(200, 30, 40), (40, 180, 60), (20, 60, 220), (230, 220, 40), (128, 128, 128)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five pictures of one colour each, 48x30; the last is a PNG."""
    root = tmp_path / "pictures"
    for number, colour in enumerate(COLOURS):
        path = (
            root / ("cat" if number < 2 else "dog") / f"{number}.{'png' if number == 4 else 'jpg'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 30), colour).save(path)
    return root


@pytest.fixture
def ffcv() -> Any:
    from loaders.backends.ffcv import import_ffcv

    try:
        return import_ffcv()
    except BackendMissing as error:
        pytest.skip(str(error))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("convert: ")
    assert err.count("\n") == 1
    return err


def opened(path: Path) -> Any:
    from loaders.backends import open_source

    return open_source(path, "ffcv")


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "pictures")


# ---- what it writes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [[], ["--quality", "95"], ["--mode", "raw"], ["--workers", "1"]]
)
def test_a_folder_becomes_a_beton_with_its_pictures_and_labels(
    options: list[str], folder: Path, ffcv: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out.beton"
    assert main([str(folder), str(out), *options]) == 0
    source = opened(out)
    assert source.labels == [0, 0, 1, 1, 1]
    for (picture, _), colour in zip((source[i] for i in range(5)), COLOURS, strict=True):
        assert picture.shape == (3, 30, 48)
        assert (picture.float().mean((1, 2)) - torch.tensor(colour)).abs().max() < 4
    assert left_behind(folder.parent) == ["out.beton"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "pictures: 5" in lines[0]
    assert f"bytes: {out.stat().st_size}" in lines[0]
    assert lines[0].endswith(" s")


def test_jpegs_are_kept_to_the_byte_unless_a_quality_is_given(
    folder: Path, ffcv: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, encoded = folder.parent / "kept.beton", folder.parent / "encoded.beton"
    assert main([str(folder), str(kept)]) == 0
    assert "(JPEGs kept as they were: 4)" in capsys.readouterr().out
    assert main([str(folder), str(encoded), "--quality", "50"]) == 0
    assert "JPEGs kept" not in capsys.readouterr().out
    for path in sorted(folder.rglob("*.jpg")):
        assert path.read_bytes() in kept.read_bytes()
        assert path.read_bytes() not in encoded.read_bytes()


def test_a_tar_gives_the_same_file_as_the_folder_that_is_in_it(folder: Path, ffcv: Any) -> None:
    with tarfile.open(folder.parent / "p.tar", "w") as tar:
        tar.add(folder, arcname=".")
    files = [folder.parent / "folder.beton", folder.parent / "tar.beton"]
    for source, out in zip((folder, folder.parent / "p.tar"), files, strict=True):
        assert main([str(source), str(out)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_file_does_not_depend_on_the_workers(folder: Path, ffcv: Any) -> None:
    files = [folder.parent / f"{n}.beton" for n in (1, 2, 5)]
    for n, path in zip((1, 2, 5), files, strict=True):
        assert main([str(folder), str(path), "--workers", str(n)]) == 0
    assert len({path.read_bytes() for path in files}) == 1


def test_a_longest_side_shrinks_the_larger_pictures_alone(folder: Path, ffcv: Any) -> None:
    Image.new("RGB", (12, 16), (9, 9, 9)).save(folder / "dog" / "small.jpg")
    out = folder.parent / "out.beton"
    assert main([str(folder), str(out), "--max-side", "24"]) == 0
    source = opened(out)
    assert [tuple(source[i][0].shape) for i in range(6)] == [(3, 15, 24)] * 5 + [(3, 16, 12)]


def test_no_picture_lies_across_two_pages(tmp_path: Path, ffcv: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 1000, 1100, 3), dtype=np.uint8)
    from loaders.backends.beton import Encoding, convert

    source = PictureArrays(pixels, np.arange(7), ())
    convert(source, tmp_path / "out.beton", Encoding("raw"))
    reader = ffcv.reader.Reader(str(tmp_path / "out.beton"))
    first = reader.alloc_table["ptr"] // reader.page_size
    last = (reader.alloc_table["ptr"] + reader.alloc_table["size"] - 1) // reader.page_size
    assert (first == last).all()
    assert len({*first.tolist()}) == 4
    read = opened(tmp_path / "out.beton")
    assert all(torch.equal(read[i][0], source[i][0]) for i in range(7))


def make_samples() -> Any:
    """What `module:function` names in the test below."""
    pictures = [
        torch.full((3, 4, 6), 10, dtype=torch.uint8),
        np.full((4, 6, 3), 20, dtype=np.uint8),
        Image.new("L", (6, 4), 30),
    ]
    return [(picture, np.int64(7)) for picture in pictures]


def test_any_data_set_that_a_function_returns_can_be_converted(
    tmp_path: Path, ffcv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "their_data", sys.modules[__name__])
    out = tmp_path / "out.beton"
    assert main(["their_data:make_samples", str(out), "--mode", "raw"]) == 0
    source = opened(out)
    assert source.labels == [7, 7, 7]
    assert [source[i][0].unique().tolist() for i in range(3)] == [[10], [20], [30]]


def test_force_replaces_a_file_and_without_it_nothing_is_touched(
    folder: Path, ffcv: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out.beton"
    out.write_text("mine")
    assert main([str(folder), str(out)]) == 2
    assert "exists: give --force" in said(capsys)
    assert out.read_text() == "mine"
    assert main([str(folder), str(out), "--force"]) == 0
    assert len(opened(out)) == 5


# ---- what it says -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nothing", "out.beton"], "no nothing: give a folder"),
        (["no_such_module:f", "out.beton"], "no_such_module:f gives no data set: ModuleNotFound"),
        (["os:no_such_function", "out.beton"], "gives no data set: AttributeError"),
        (["os:getpid", "out.beton"], "gives int, not a data set"),
        (["pictures", "out.tar"], "out.tar does not end in .beton"),
        (["pictures", "missing/out.beton"], "no folder missing to write to"),
        (["pictures", "out.beton", "--mode", "raw", "--quality", "9"], "--quality has no effect"),
        (["pictures", "out.beton", "--test"], "--test chooses the test part of CIFAR-10"),
        (["empty", "out.beton"], "no pictures under empty"),
        (["a.beton", "out.beton"], 'backend="ffcv"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str],
    complaint: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("empty").mkdir()
    Path("a.beton").touch()
    assert main(argv) == 2
    assert complaint in said(capsys)
    assert not Path("out.beton").exists()


@pytest.mark.parametrize(
    "options", [["--mode", "png"], ["--quality", "0"], ["--max-side", "x"], ["--workers", "0"], []]
)
def test_a_wrong_option_is_exit_code_2(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["pictures", "out.beton", *options] if options else ["pictures"])
    assert error.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_damaged_picture_stops_the_conversion_and_leaves_the_old_file(
    folder: Path, ffcv: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out, bad = folder.parent / "out.beton", folder / "dog" / "2.jpg"
    out.write_text("mine")
    bad.write_bytes(bad.read_bytes()[:-40])
    assert main([str(folder), str(out), "--force"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"convert: cannot decode picture {bad}: ")
    assert out.read_text() == "mine"
    assert left_behind(folder.parent) == ["out.beton"]


def test_a_picture_larger_than_a_page_says_what_to_do(
    folder: Path, ffcv: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (2000, 1500)).save(folder / "cat" / "large.jpg")
    assert main([str(folder), str(folder.parent / "out.beton"), "--mode", "raw"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "sample 2 takes 8.6 MiB, a page of the file has 8: give --max-side" in error
    assert left_behind(folder.parent) == []


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ((torch.zeros(3, 2, 2), 1), "the picture of sample 0 is float32 of shape (2, 2, 3)"),
        ((torch.zeros(2, 2, dtype=torch.uint8), 1), "sample 0 is torch.uint8 of shape (2, 2)"),
        ((torch.zeros(1, 2, 2, dtype=torch.uint8), 1), "sample 0 has 1 channels"),
        ((Image.new("RGB", (2, 2)), "cat"), "sample 0 cannot be read as (picture, label)"),
        (Image.new("RGB", (2, 2)), "sample 0 cannot be read as (picture, label)"),
    ],
    ids=["floats", "flat", "grey", "label", "no label"],
)
def test_samples_that_ffcv_cannot_store_are_named(
    sample: Any,
    complaint: str,
    tmp_path: Path,
    ffcv: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "make_samples", lambda: [sample])
    monkeypatch.setitem(sys.modules, "their_data", sys.modules[__name__])
    assert main(["their_data:make_samples", str(tmp_path / "out.beton")]) == 2
    assert complaint in said(capsys)
    assert left_behind(tmp_path) == []


def test_without_ffcv_it_says_how_to_get_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ffcv", None)
    assert main([str(folder), str(folder.parent / "out.beton")]) == 2
    assert "pip install '.[ffcv]'" in said(capsys)
