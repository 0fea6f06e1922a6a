"""An adopted ImageFolder: what our decoder reads of it has Pillow's bits, whatever lies there."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, Resize, v2

from loaders import ReuseLoader, Workers
from loaders.adopting import native_folder
from loaders.adopting.native_folder import NativeFolder, decoded_natively
from loaders.adopting.transforms import Decode
from loaders.augment import Chain, RandomResizedCrop
from loaders.pixels.resizing import resizes

HEIGHT, WIDTH = 37, 53
KINDS: dict[str, dict[str, Any]] = {
    "420.jpg": {"subsampling": 2},
    "422.jpg": {"subsampling": 1},
    "444.jpeg": {"subsampling": 0},
    "progressive.jpg": {"progressive": True},
    "low.jpg": {"quality": 5},
    "a.png": {},
    "a.webp": {},
}


def noise(seed: int, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six of each kind: grey ones, printers' ones, turned ones and damaged ones, too."""
    root = tmp_path_factory.mktemp("mixed")
    for number in range(6):
        folder = root / f"class {number % 2}"
        folder.mkdir(exist_ok=True)
        picture = noise(number, HEIGHT + number)
        for name, options in KINDS.items():
            picture.save(folder / f"{number} {name}", **options)
        picture.convert("L").save(folder / f"{number} grey.jpg")
        picture.convert("CMYK").save(folder / f"{number} printed.jpg")
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.save(folder / f"{number} turned.jpg", exif=exif)
        # Something follows the end: Pillow does not mind, and a strict decoder may.
        data = (folder / f"{number} 420.jpg").read_bytes()
        (folder / f"{number} longer.jpg").write_bytes(data + b"\xff\xd8 more")
    return root


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("jpegs")
    for number in range(16):
        (root / f"{number % 2}").mkdir(exist_ok=True)
        noise(number).save(root / f"{number % 2}" / f"{number}.jpg")
    return root


def as_array(picture: Any) -> Any:
    if isinstance(picture, torch.Tensor):
        return picture.numpy()
    return np.asarray(picture).transpose(2, 0, 1)


CUBIC = v2.InterpolationMode.BICUBIC
TRANSFORMS: dict[str, Any] = {
    "none": None,
    "PILToTensor": Decode((PILToTensor(),)),
    "ToImage": Decode((v2.Identity(), v2.ToImage(), v2.ToPureTensor())),
    "Resize": Decode((Resize(20), PILToTensor())),
    "Resize to less than half of the height": Decode((Resize((10, 50)), v2.ToImage())),
    "Resize, then a crop": Decode((v2.Resize([30], CUBIC), v2.CenterCrop(20), PILToTensor())),
    "Resize with Pillow's number": Decode((v2.Resize(20, Image.Resampling.BICUBIC),)),
    "a nearest size": Decode((v2.Resize(20, v2.InterpolationMode.NEAREST), PILToTensor())),
    "a longest side": Decode((Resize(20, max_size=25), PILToTensor())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_sample_is_that_of_the_folder_to_the_last_bit(mixed: Path, transform: str) -> None:
    theirs = ImageFolder(str(mixed), transform=TRANSFORMS[transform])
    ours, said = decoded_natively(theirs)
    assert isinstance(ours, NativeFolder)
    what = "decoded and resized" if ours.resizing else "decoded"
    assert said == f"JPEG {what} natively, with Pillow's bits"
    assert (ours.resizing is not None) == (transform.startswith("Resize") and resizes())
    assert len(ours) == len(theirs)
    for _ in range(2):
        for index in range(len(theirs)):
            (mine, label), (other, expected) = ours[index], theirs[index]
            assert label == expected
            assert np.array_equal(as_array(mine), as_array(other))
            if isinstance(other, torch.Tensor):
                assert type(mine) is type(other) and mine.stride() == other.stride()
    counts = Counter(ours.counts.snapshot())
    rows_first = transform == "Resize to less than half of the height"
    assert (counts["JPEG natively"] > len(theirs)) != (rows_first and resizes())  # of both rounds
    assert counts["PNG by Pillow"] == counts["WEBP by Pillow"] == 12
    assert sum(counts.values()) == 2 * len(theirs)


def test_pillow_resizes_what_we_decoded_where_we_cannot(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_folder, "resizes", lambda: False)
    theirs = ImageFolder(str(mixed), transform=TRANSFORMS["Resize"])
    ours, said = decoded_natively(theirs)
    assert said == "JPEG decoded natively, with Pillow's bits"
    for index in range(len(theirs)):
        assert torch.equal(ours[index][0], cast(Any, theirs[index][0]))
    assert ours.counts.snapshot()["JPEG natively"] > len(theirs) // 2


def own_loader(path: str) -> Any:
    return pil_loader(path).rotate(90)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loader": own_loader}, "its loader is not torchvision's"),
        ({"target_transform": int}, "it has a target_transform"),
        ({"transform": Compose([PILToTensor()])}, "its transform is not split"),
    ],
)
def test_what_is_the_users_own_is_left_to_him(jpegs: Path, options: Any, said: str) -> None:
    theirs = ImageFolder(str(jpegs), **options)
    ours, told = decoded_natively(theirs)
    assert ours is theirs
    assert told == f"decoded by the data set ({said})"


def test_subsets_and_concatenations_are_looked_into(jpegs: Path) -> None:
    theirs = ImageFolder(str(jpegs))
    both = ConcatDataset([Subset(theirs, [3, 5]), theirs])
    made, said = decoded_natively(both)
    ours: Any = made
    assert said == "JPEG decoded natively, with Pillow's bits"
    assert isinstance(ours.datasets[0].dataset, NativeFolder)
    assert both.datasets[1] is theirs  # what was given is not changed
    for index in range(len(both)):
        assert np.array_equal(as_array(ours[index][0]), as_array(cast(Any, both[index])[0]))


def test_a_damaged_picture_has_pillows_error_with_its_sample(jpegs: Path, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        data = (jpegs / f"{number % 2}" / f"{number}.jpg").read_bytes()
        (tmp_path / f"{number % 2}" / f"{number}.jpg").write_bytes(data[: 200 if number else None])
    folder = ImageFolder(str(tmp_path), v2.PILToTensor())
    theirs = DataLoader(folder, 2)  # type: ignore[arg-type]
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        with pytest.raises(OSError) as error:
            list(loader)
        assert "while decoding sample 1 of pass 0" in error.value.__notes__
    with pytest.raises(type(error.value)) as plain:
        folder[1]
    assert str(error.value) == str(plain.value)


@pytest.mark.parametrize(
    "reading", [Workers(2), Workers(2, "process"), Workers(2, timeout=60)], ids=str
)
@pytest.mark.parametrize("flipped", [False, True])
def test_an_adopted_loader_serves_the_same_and_says_who_decodes(
    jpegs: Path, reading: Any, flipped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Drawn alike by the same code: once of our pixels, once of Pillow's."""
    steps = Compose([RandomHorizontalFlip(0.5), PILToTensor()]) if flipped else PILToTensor()

    def served(**options: Any) -> list[Any]:
        theirs = DataLoader(ImageFolder(str(jpegs), steps, **options), 4)  # type: ignore[arg-type]
        with ReuseLoader.from_dataloader(theirs, reuse=2, seed=3, workers=reading) as loader:
            return [*loader]

    caplog.set_level(logging.INFO, "loaders.summary")
    native = served()
    assert "JPEG decoded natively, with Pillow's bits" in caplog.text
    plain = served(loader=plain_loader)
    assert "decoded by the data set (its loader is not torchvision's)" in caplog.text
    for mine, other in zip(native, plain, strict=True):
        assert all(map(torch.equal, mine, other))


def plain_loader(path: str) -> Any:
    return pil_loader(path)


# ---- who decoded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reading", [Workers(2), Workers(2, "process"), Workers(2, timeout=60)], ids=str
)
def test_stats_say_how_many_pictures_of_which_format_were_decoded_by_whom(
    mixed: Path, reading: Any
) -> None:
    crop = Chain([RandomResizedCrop(16)])
    with ReuseLoader(mixed, 4, reuse=2, workers=reading, augment=crop) as loader:
        for _ in loader:
            pass
        counts = dict(loader.stats.decoders)
        samples = len(loader.dataset)
    # What is decoded ahead for the next pass counts, too, and may go on until it is closed.
    assert all(n <= dict(loader.stats.decoders)[name] for name, n in counts.items())
    assert {*counts} == {
        "JPEG natively", "JPEG by Pillow", "PNG by Pillow", "WEBP by Pillow",
    }  # fmt: skip
    assert sum(counts.values()) >= samples
    assert counts["PNG by Pillow"] >= 6 and counts["WEBP by Pillow"] >= 6
    assert counts["JPEG by Pillow"] >= 6  # those for printers
