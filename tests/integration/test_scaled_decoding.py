"""decode="scaled": JPEGs of an adopted folder are decoded smaller where their crops allow it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from loaders import Cache, ReuseLoader, Workers
from loaders.errors import LaneError
from loaders.lanes.lane_loader import LaneLoader
from loaders.pixels.crops import Crops
from loaders.pixels.jpegs import ANYWHERE, Jpeg, Room, decodes_jpegs

pytestmark = pytest.mark.skipif(not decodes_jpegs(), reason="the kernels were not compiled")

LARGE = v2.Compose([v2.RandomResizedCrop(16, (0.5, 1.0)), v2.PILToTensor()])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth pictures: a smaller one shows the same."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        small = np.random.default_rng(number).integers(0, 256, (2, 3, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((40 + 20 * number, 35 + 15 * number))
        (root / f"{number % 2}").mkdir(exist_ok=True)
        picture.save(root / f"{number % 2}" / f"{number}.{'png' if number == 11 else 'jpg'}")
    return root


def served(data: Any, reuse: int = 2, **changes: Any) -> tuple[list[torch.Tensor], dict[str, int]]:
    theirs: Any = DataLoader(data, 4)
    how: Any = {"seed": 3, **changes}
    with ReuseLoader.from_dataloader(theirs, reuse, **how) as loader:
        assert loader.dataset is data
        made = [images.clone() for _ in range(2) for images, _ in loader]
        return made, dict(loader.stats.decoders)


@pytest.mark.parametrize("workers", [0, 2])
def test_large_pictures_are_decoded_smaller_and_show_the_same(photos: Path, workers: int) -> None:
    folder = ImageFolder(str(photos), LARGE)
    exact, whole = served(folder)
    scaled, counts = served(folder, decode="scaled", workers=workers)
    assert not all(map(torch.equal, exact, scaled))
    for one, other in zip(exact, scaled, strict=True):
        assert (one.float() - other.float()).abs().mean() < 4
    assert {*whole} == {"JPEG natively", "PNG by Pillow"}
    assert {*counts} > {"JPEG at 1/2 natively", "JPEG at 1/4 natively", "PNG by Pillow"}


def test_a_resumed_run_repeats_the_bits(photos: Path) -> None:
    def loader() -> ReuseLoader:
        theirs: Any = DataLoader(ImageFolder(str(photos), LARGE), 4)
        return ReuseLoader.from_dataloader(theirs, 2, seed=3, decode="scaled")

    with loader() as first:
        whole = [(images.clone(), first.state_dict()) for images, _ in first]
    for number, (_, state) in enumerate(whole[:-1], start=1):
        with loader() as second:
            second.load_state_dict(state)
            rest = [images.clone() for images, _ in second]
        assert all(map(torch.equal, [images for images, _ in whole[number:]], rest))


@pytest.mark.parametrize("eighths", [1, 2, 4])
def test_a_window_has_the_bits_of_the_whole_smaller_picture(eighths: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (160, 203, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=90)
    box = (25, 39, 90, 101)
    crops = Crops(lambda *_: [box], [(11, 12)])
    with Jpeg(file.getvalue()) as jpeg:
        part = jpeg.decode(Room(ANYWHERE.memory, crops), eighths)
    with Jpeg(file.getvalue()) as jpeg:
        whole = jpeg.decode(ANYWHERE, eighths)
    assert whole.shape == (-(-160 * eighths // 8), -(-203 * eighths // 8), 3)
    at = crops.part
    assert at is not None and (at.height, at.width, at.eighths) == (160, 203, eighths)
    assert (part == whole[at.top :, at.left :][: len(part), : part.shape[1]]).all()
    assert at.top <= 25 * eighths // 8 and at.top + len(part) >= -(-115 * eighths // 8)


RAM = Cache("ram", limit_bytes=1 << 20)
COLLATE: Any = torch.utils.data.default_convert
RESIZED = v2.Compose([v2.Resize(32), *LARGE.transforms])
FLIPPED = v2.Compose([v2.RandomHorizontalFlip(), *LARGE.transforms])


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (lambda root: [(torch.zeros(3, 8, 8), 0)] * 8, {}, "list is no ImageFolder"),
        (lambda root: ConcatDataset([ImageFolder(root, LARGE)]), {}, "ConcatDataset is"),
        (lambda root: ImageFolder(root, LARGE, loader=Image.open), {}, "its loader is not"),
        (lambda root: ImageFolder(root, RESIZED), {}, "its transform changes the whole picture"),
        (lambda root: ImageFolder(root, FLIPPED), {}, "no RandomResizedCrop"),
        (lambda root: ImageFolder(root, v2.PILToTensor()), {}, "no RandomResizedCrop"),
        (lambda root: ImageFolder(root, LARGE), {"cache": RAM}, "the cache keeps"),
        (lambda root: ImageFolder(root, LARGE), {"collate": COLLATE}, "a collate function"),
        (lambda root: ImageFolder(root, LARGE), {"workers": Workers(2, timeout=9)}, "only threads"),
        (lambda root: ImageFolder(root, LARGE), {"workers": Workers(2, "process")}, "only threads"),
        (lambda root: ImageFolder(root, LARGE), {"decode": "half"}, "must be one of exact, scaled"),
    ],
)
def test_where_it_cannot_be_done_it_is_refused(
    photos: Path, make: Any, changes: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        served(make(str(photos)), **{"decode": "scaled", "workers": 2, **changes})


def test_subsets_are_decoded_smaller_and_lanes_refuse(photos: Path) -> None:
    folder = ImageFolder(str(photos), LARGE)
    _, counts = served(Subset(folder, range(2, 12)), decode="scaled")
    assert "JPEG at 1/2 natively" in counts
    theirs: Any = DataLoader(folder, 2)
    with (
        ReuseLoader.from_dataloader(theirs, 1, decode="scaled") as loader,
        pytest.raises(LaneError, match="no effect on lanes"),
    ):
        LaneLoader(loader, 2)
