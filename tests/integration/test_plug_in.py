"""What a user has already, given to a ReuseLoader: data sets and transforms."""

import logging
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.numbered_samples import Made
from torch.utils.data import TensorDataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from loaders import ReuseLoader
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import Flip

SAMPLES, BATCH, REUSE = 14, 4, 3


def noise(index: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pixels(index: int) -> torch.Tensor:
    return torch.from_numpy(noise(index)).permute(2, 0, 1)


# ---- samples of all kinds -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pil_pictures_become_tensors_with_channels_first(mode: str) -> None:
    dataset = Made(SAMPLES, lambda i: (Image.fromarray(noise(i)).convert(mode), i))
    with ReuseLoader(dataset, BATCH, reuse=2, workers=1) as loader:
        for pictures, ids in loader:
            for picture, i in zip(pictures, ids.tolist(), strict=True):
                assert torch.equal(picture, v2.functional.pil_to_tensor(dataset[i][0]))


# ---- samples that differ in size ----------------------------------------------------------------


def varying(i: int) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(noise(i, 8 + i % 5, 9 + i % 3)).permute(2, 0, 1), i


def test_samples_that_differ_in_size_go_to_a_collate_of_the_users_own() -> None:
    def pad(samples: list[Any]) -> Any:
        whole = torch.zeros(len(samples), 3, 13, 12, dtype=torch.uint8)
        for row, (picture, _) in zip(whole, samples, strict=True):
            row[:, : picture.shape[1], : picture.shape[2]] = picture
        return whole, torch.tensor([i for _, i in samples])

    with ReuseLoader(Made(SAMPLES, varying), BATCH, reuse=REUSE, workers=2, collate=pad) as loader:
        served: list[int] = []
        for pictures, ids in loader:
            served += ids.tolist()
            assert torch.equal(pictures, pad([varying(i) for i in ids.tolist()])[0])
    assert Counter(served) == dict.fromkeys(range(SAMPLES), REUSE)


def test_samples_that_differ_in_size_and_are_not_made_one_size_are_refused() -> None:
    with (
        ReuseLoader(Made(SAMPLES, varying), BATCH, reuse=2, workers=1) as loader,
        pytest.raises(SampleShapeError, match="RandomResizedCrop") as error,
    ):
        list(loader)
    assert "collate" in str(error.value)


# ---- folders, archives, arrays ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, make_pictures: Any) -> Path:
    return make_pictures(tmp_path / "pictures", {"cat": 9, "dog": 5})


def by_id(loader: ReuseLoader) -> dict[int, list[torch.Tensor]]:
    """Every serve of every sample in a pass."""
    seen: dict[int, list[torch.Tensor]] = {}
    for pictures, _ in loader:
        assert loader.last_batch is not None
        for i, picture in zip(loader.last_batch.ids.tolist(), pictures, strict=True):
            seen.setdefault(i, []).append(picture)
    return seen


def test_a_folder_and_a_tar_of_pictures_give_what_image_folder_gives(
    folder: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "pictures.tar"
    with tarfile.open(archive, "w") as tar:
        for path in sorted(folder.rglob("*.jpg")):
            tar.add(path, path.relative_to(folder).as_posix())
    theirs = [v2.functional.pil_to_tensor(picture) for picture, _ in ImageFolder(str(folder))]
    for source in (folder, str(folder), archive, ImageFolder(str(folder))):
        with ReuseLoader(source, BATCH, reuse=2, workers=2) as loader:
            mine = by_id(loader)
        assert sorted(mine) == list(range(SAMPLES))
        for i, pictures in mine.items():
            assert len(pictures) == 2
            for picture in pictures:
                # JPEG decoders round differently.
                assert (picture.int() - theirs[i].int()).abs().float().mean() < 1.0


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
NO_DICE = [
    [v1.Resize(12), v1.CenterCrop(10), v1.ToTensor(), v1.Normalize(MEAN, STD)],
    [
        v2.Resize(12),
        v2.CenterCrop(10),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ],
]


@pytest.mark.parametrize("chain", NO_DICE, ids=["v1", "v2"])
@pytest.mark.parametrize("wrapped", [v1.Compose, v2.Compose])
def test_an_image_folder_without_dice_gives_torchvisions_numbers(
    folder: Path, chain: list[Any], wrapped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ImageFolder(str(folder), wrapped(chain))
    with caplog.at_level(logging.INFO, "loaders"), ReuseLoader(dataset, BATCH, workers=2) as loader:
        mine = by_id(loader)
    assert dataset.transform.transforms == chain  # the user's own is left as it was
    for i, pictures in mine.items():
        for picture in pictures:
            assert torch.allclose(picture, dataset[i][0], atol=1e-5)
    said = next(r.getMessage() for r in caplog.records if "cached:" in r.getMessage())
    assert said.startswith("cached: Resize, CenterCrop")
    assert "redone at every serve: To" in said
    assert "four times the memory" in said


@pytest.mark.parametrize("v", [v1, v2], ids=["v1", "v2"])
def test_dice_are_rolled_as_torchvision_rolls_them_and_again_at_every_serve(
    folder: Path, v: Any, caplog: pytest.LogCaptureFixture
) -> None:
    last = [v1.ToTensor()] if v is v1 else [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    chain = [v.Resize(12), v.RandomCrop(10), v.RandomHorizontalFlip(), *last]
    dataset = ImageFolder(str(folder), v.Compose(chain))
    with (
        caplog.at_level(logging.INFO, "loaders"),
        ReuseLoader(dataset, BATCH, reuse=40, workers=2) as loader,
    ):
        mine = by_id(loader)
    # Their outcomes: 3 x 3 places, flipped or not.
    for i, pictures in mine.items():
        small = v2.functional.pil_to_tensor(v.Resize(12)(dataset.loader(dataset.imgs[i][0])))
        cuts = [small[:, y : y + 10, x : x + 10] / 255 for y in range(3) for x in range(3)]
        outcomes = torch.stack([*cuts, *(cut.flip(-1) for cut in cuts)])
        which = [int((outcomes - p).abs().amax((1, 2, 3)).argmin()) for p in pictures]
        best = torch.stack(pictures) - outcomes[which]
        assert best.abs().max() < 1e-5
        assert len(set(which)) > 9  # of 18 in 40 serves
    said = next(r.getMessage() for r in caplog.records if "cached:" in r.getMessage())
    assert said.startswith("cached: Resize; redone at every serve: RandomCrop,")
    assert "(RandomCrop is random)" in said


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[:, :3, ::2, ::2],
        lambda whole: whole[:, :3],
        lambda whole: whole[:, :3].permute(0, 1, 3, 2),
        lambda whole: whole[:, :3].contiguous(memory_format=torch.channels_last),
    ],
)
def test_tensors_in_memory_may_be_views_of_larger_ones(view: Any) -> None:
    whole = torch.stack([torch.cat([pixels(i), pixels(i)]) for i in range(SAMPLES)])
    pictures = view(whole)
    dataset = TensorDataset(pictures, torch.arange(SAMPLES))
    with ReuseLoader(dataset, BATCH, reuse=2, workers=1, augment=Flip(1.0)) as loader:
        for mine, ids in loader:
            assert torch.equal(mine, pictures[ids].flip(-1))


# ---- pictures that need care --------------------------------------------------------------------


def test_an_adopted_image_folder_reads_as_torchvision_does_and_does_not_turn(
    tmp_path: Path,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(noise(1, 8, 16)).save(tmp_path / name / "a.jpg", exif=exif, quality=95)
    folder = ImageFolder(str(tmp_path), transform=v2.PILToTensor())
    with ReuseLoader(folder, 2, 1, shuffle=False, workers=1) as loader:
        (adopted,) = [pictures for pictures, _ in loader]
    assert torch.equal(adopted, torch.stack([picture for picture, _ in folder]))
    with ReuseLoader(tmp_path, 2, 1, shuffle=False, workers=1) as loader:
        (own,) = [pictures for pictures, _ in loader]
    assert own.shape == (2, 3, 16, 8)
    assert (own.int() - torch.rot90(adopted, -1, (2, 3)).int()).abs().max() <= 4
