"""CIFAR-10 in two archives: what comes out has the pixels and labels that went in."""

import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as run.sh has it

from gpu import carried  # noqa: E402

NAMES = [name for batches in carried.ARCHIVES.values() for name in batches]


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Six batches of 7 drawn pictures, as CIFAR-10's own files are."""
    folder = tmp_path / "cifar"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in NAMES:
        pixels = rng.integers(256, size=(7, 3072), dtype=np.uint8)
        labels = rng.integers(10, size=7).tolist()
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}))
    return folder


def test_archives_unpack_one_by_one_to_equal_pixels_and_labels(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried, "STRIP", 3)  # the last strip of a batch is shorter
    first, second = carried.pack(cifar, tmp_path / "out")
    there = tmp_path / carried.FOLDER
    assert carried.unpack(tmp_path, [second]) == NAMES[3:]
    assert carried.check(cifar, there) == NAMES[:3]
    assert carried.unpack(tmp_path, [first]) == NAMES[:3]
    assert carried.check(cifar, there) == []
    with (cifar / NAMES[0]).open("rb") as ours, (there / NAMES[0]).open("rb") as theirs:
        assert np.array_equal(pickle.load(ours)[b"data"], pickle.load(theirs)[b"data"])


def test_a_batch_that_comes_out_otherwise_is_not_written(cifar: Path, tmp_path: Path) -> None:
    [path, _] = carried.pack(cifar, tmp_path / "out")
    damaged = tmp_path / "damaged.zip"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(damaged, "w") as other:
        for entry in whole.namelist():
            data = whole.read(entry)
            if entry == f"{NAMES[0]}/labels":
                data = bytes([*data[:-1], data[-1] ^ 1])
            other.writestr(entry, data)
    with pytest.raises(SystemExit, match="data_batch_1 does not come out as it went in"):
        carried.unpack(tmp_path, [damaged])
    assert not (tmp_path / carried.FOLDER / NAMES[0]).exists()


def test_a_pixel_that_differs_is_found(cifar: Path, tmp_path: Path) -> None:
    carried.unpack(tmp_path, carried.pack(cifar, tmp_path / "out"))
    batch = carried.read(cifar / NAMES[4])
    pixels = batch.pixels.copy()
    pixels[6, 3071] ^= 1
    (cifar / NAMES[4]).write_bytes(pickle.dumps({b"data": pixels, b"labels": list(batch.labels)}))
    assert carried.check(cifar, tmp_path / carried.FOLDER) == [NAMES[4]]
