"""What `open_source` refuses, and how it says so; no backend's package is needed to know."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.backends import BACKENDS, open_source
from loaders.errors import BackendMissing, LoaderError, SourceError
from loaders.sources.datasets import PictureArrays, picture_folder

ARRAYS = PictureArrays(np.zeros((4, 2, 2, 3), dtype=np.uint8), np.arange(4), ("a", "b"))


def test_there_are_three_backends() -> None:
    assert BACKENDS == ("native", "dali", "ffcv")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    backend: Any = "daly"
    with pytest.raises(ValueError, match="one of native, dali, ffcv, not 'daly'"):
        open_source(ARRAYS, backend)


def test_a_data_set_is_its_own_native_source() -> None:
    assert open_source(ARRAYS) is ARRAYS


@pytest.mark.parametrize("kind", [Path, str])
def test_a_path_to_a_folder_is_its_pictures(kind: Any, tmp_path: Path, make_pictures: Any) -> None:
    make_pictures(tmp_path, {"cat": 2, "dog": 1})
    source = open_source(kind(tmp_path), size=8)
    assert source.classes == ("cat", "dog")
    assert source[0][0].shape == (3, 8, 8)


def test_a_missing_folder_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no folder"):
        open_source(tmp_path / "nothing")


def test_a_beton_asks_for_its_backend(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match='backend="ffcv"'):
        open_source(tmp_path / "pictures.beton")


@pytest.mark.parametrize("backend", ["native", "dali"])
def test_a_size_for_a_data_set_that_has_one_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="size=8 has no effect"):
        open_source(ARRAYS, backend, size=8)


def test_a_size_for_a_beton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size=8 has no effect"):
        open_source(tmp_path / "pictures.beton", "ffcv", size=8)


@pytest.mark.parametrize("source", [ARRAYS, Path("pictures"), "pictures.tar"], ids=type)
def test_ffcv_reads_betons_alone_and_says_how_to_write_one(source: Any) -> None:
    with pytest.raises(SourceError, match=r"reads \.beton files.*python -m loaders\.convert"):
        open_source(source, "ffcv")


def test_dali_decodes_files_alone() -> None:
    with pytest.raises(SourceError, match=r"dali backend decodes pictures in files.*PictureArrays"):
        open_source(ARRAYS, "dali")


@pytest.mark.parametrize(("backend", "package"), [("dali", "nvidia.dali"), ("ffcv", "ffcv")])
def test_a_missing_package_names_the_extra_that_brings_it(
    backend: Any,
    package: str,
    tmp_path: Path,
    make_pictures: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    folder = picture_folder(make_pictures(tmp_path, {"cat": 1, "dog": 1}), 8)
    (tmp_path / "pictures.beton").touch()
    source = tmp_path / "pictures.beton" if backend == "ffcv" else folder
    with pytest.raises(BackendMissing, match=rf"\.\[{backend}\]") as error:
        open_source(source, backend)
    assert isinstance(error.value, LoaderError)
    assert isinstance(error.value.__cause__, ImportError)
