"""Pictures with masks, boxes and key points, which one random draw moves together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from surveyed_pipelines.made_up_data import nothing, picture, pixels, write_pictures
from surveyed_pipelines.pipeline_case import BATCH, COUNT, SIDE, Pipeline, library, whole_sample

Transform = Callable[[Any], Any]


def in_masks(batch: Any) -> list[int]:
    """The largest value of each mask tells whose it is."""
    return [int(mask.max()) - 1 for mask in batch[1]]


# ---- Oxford-IIIT Pet: a picture and its trimap ---------------------------------------------------


def write_pets(folder: Path) -> None:
    base = folder / "oxford-iiit-pet"
    write_pictures(base)
    (base / "annotations" / "trimaps").mkdir(parents=True)
    names = [f"{number:03d}" for number in range(COUNT)]
    for name in names:
        (base / "masks" / f"{name}.png").rename(base / "annotations" / "trimaps" / f"{name}.png")
    lines = "".join(f"{name} 1 1 1\n" for name in names)
    (base / "annotations" / "trainval.txt").write_text(lines)


class BothV2:
    """torchvision.transforms.v2 on (picture, mask)."""

    def __init__(self, random: bool) -> None:
        moved = (
            [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()]
            if random
            else [v2.Resize(SIDE, antialias=True), v2.CenterCrop(SIDE)]
        )
        types = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
        self.chain = v2.Compose([v2.ToImage(), *moved, v2.ToDtype(types, scale=True)])

    def __call__(self, sample: Any) -> Any:
        return self.chain(*sample)


def pets(folder: Path, transforms: Any) -> DataLoader[Any]:
    dataset = datasets.OxfordIIITPet(
        str(folder), "trainval", target_types="segmentation", transforms=transforms
    )
    wrapped: Any = datasets.wrap_dataset_for_transforms_v2(dataset)
    return DataLoader(wrapped, BATCH, shuffle=True, num_workers=2)


# ---- Penn-Fudan, as torchvision's detection tutorial has it --------------------------------------


def in_corners(boxes: torch.Tensor, canvas: tuple[int, int]) -> torch.Tensor:
    kind: Any = tv_tensors.BoundingBoxes  # its stub lacks these arguments
    return kind(boxes, format="XYXY", canvas_size=canvas)


class Pedestrians(Dataset[Any]):
    def __init__(self, folder: Path, transforms: Callable[..., Any] | None) -> None:
        self.files = sorted((folder / "images").iterdir())
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        img = tv_tensors.Image(v2.functional.pil_to_tensor(Image.open(self.files[index])))
        height, width = img.shape[-2:]
        many = 1 + index % 3
        boxes = torch.tensor([[4.0 + 3 * n, 5.0, 20.0 + 3 * n, 30.0] for n in range(many)])
        masks = torch.zeros(many, height, width, dtype=torch.uint8)
        masks[:, 5:30, 4:20] = 1
        target = {
            "boxes": in_corners(boxes, (height, width)),
            "masks": tv_tensors.Mask(masks),
            "labels": torch.ones(many, dtype=torch.int64),
            "image_id": index,
            "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
            "iscrowd": torch.zeros(many, dtype=torch.int64),
        }
        return (img, target) if self.transforms is None else self.transforms(img, target)


class DetectionV2:
    def __init__(self, random: bool) -> None:
        moved = (
            [v2.RandomPhotometricDistort(p=1), v2.RandomZoomOut(fill=0), v2.RandomIoUCrop(),
             v2.RandomHorizontalFlip()]
            if random
            else []
        )  # fmt: skip
        end = [v2.SanitizeBoundingBoxes(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]
        self.chain = v2.Compose([*moved, *end])

    def __call__(self, *sample: Any) -> Any:
        return self.chain(*(sample[0] if len(sample) == 1 else sample))


def in_lists(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def pedestrians(folder: Path, transforms: Transform | None) -> DataLoader[Any]:
    dataset = Pedestrians(folder, transforms)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=2, collate_fn=in_lists)


# ---- Pascal VOC, wrapped for the transforms v2 ---------------------------------------------------


def write_voc(folder: Path) -> None:
    base = folder / "VOCdevkit" / "VOC2012"
    write_pictures(base)
    (base / "images").rename(base / "JPEGImages")
    (base / "Annotations").mkdir()
    (base / "ImageSets" / "Main").mkdir(parents=True)
    names = [f"{number:03d}" for number in range(COUNT)]
    (base / "ImageSets" / "Main" / "train.txt").write_text("\n".join(names) + "\n")
    for number, name in enumerate(names):
        size = picture(number).size
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = f"{name}.jpg"
        for part, value in zip(("width", "height"), size, strict=True):
            ElementTree.SubElement(root, part).text = str(value)
        for box in range(1 + number % 3):
            thing = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(thing, "name").text = ("cat", "dog", "bird")[box]
            place = ElementTree.SubElement(thing, "bndbox")
            corners = zip(("xmin", "ymin", "xmax", "ymax"), (2 + box, 3, 40, 30), strict=True)
            for corner, value in corners:
                ElementTree.SubElement(place, corner).text = str(value)
        ElementTree.ElementTree(root).write(base / "Annotations" / f"{name}.xml")


def voc(folder: Path, transforms: Transform | None) -> DataLoader[Any]:
    dataset = datasets.VOCDetection(str(folder), "2012", "train", transforms=transforms)
    wrapped: Any = datasets.wrap_dataset_for_transforms_v2(
        dataset, target_keys=["boxes", "labels", "annotation"]
    )
    return DataLoader(wrapped, BATCH, shuffle=True, num_workers=2, collate_fn=in_lists)


class VocV2(DetectionV2):
    """A picture of Pillow becomes a tensor first."""

    def __init__(self, random: bool) -> None:
        super().__init__(random)
        self.chain = v2.Compose([v2.ToImage(), self.chain])


def in_annotations(batch: Any) -> list[int]:
    return [int(each["annotation"]["filename"].removesuffix(".jpg")) for each in batch[1]]


# ---- albumentations: picture and mask as arrays --------------------------------------------------


class Cars(Dataset[Any]):
    """Carvana's pictures and masks, as tutorials of U-Net read them."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.folder = folder
        self.files = sorted(path.stem for path in (folder / "images").iterdir())
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        name = self.files[index]
        image = np.array(Image.open(self.folder / "images" / f"{name}.jpg").convert("RGB"))
        mask = np.array(Image.open(self.folder / "masks" / f"{name}.png").convert("L"))
        if self.transform is None:
            return image, mask.astype(np.float32)
        return self.transform((image, mask.astype(np.float32)))


class WithAlbumentations:
    def __init__(self, random: bool) -> None:
        A, tensors = library("albumentations"), library("albumentations.pytorch")

        moved = [A.Rotate(limit=35, p=1.0, border_mode=0), A.HorizontalFlip(p=0.5)]
        self.chain = A.Compose(
            [A.Resize(SIDE, SIDE, interpolation=0), *(moved if random else []),
             A.Normalize([0.0] * 3, [1.0] * 3, max_pixel_value=255.0), tensors.ToTensorV2()]
        )  # fmt: skip

    def __call__(self, sample: Any) -> Any:
        done = self.chain(image=sample[0], mask=sample[1])
        return done["image"], done["mask"]


def cars(folder: Path, transform: Any) -> DataLoader[Any]:
    return DataLoader(Cars(folder, transform), BATCH, shuffle=True, num_workers=2)


# ---- kornia: picture and mask as tensors ---------------------------------------------------------


class AsTensors(Cars):
    """The same pictures and masks, as tensors of floats."""

    def __getitem__(self, index: int) -> Any:
        name = self.files[index]
        image = Image.open(self.folder / "images" / f"{name}.jpg").convert("RGB")
        mask = Image.open(self.folder / "masks" / f"{name}.png")
        both = [v2.functional.pil_to_tensor(one) for one in (image, mask)]
        sample = both[0].float() / 255, both[1].float()
        return sample if self.transform is None else self.transform(sample)


class WithKornia:
    def __init__(self, random: bool) -> None:
        K = library("kornia.augmentation")
        moved = (
            [K.RandomCrop((SIDE, SIDE)), K.RandomHorizontalFlip(), K.RandomErasing(p=0.3)]
            if random
            else [K.CenterCrop((SIDE, SIDE))]
        )
        self.chain = K.AugmentationSequential(*moved, data_keys=["input", "mask"])

    def __call__(self, sample: Any) -> Any:
        image, mask = self.chain(*(one[None] for one in sample))
        return image[0], mask[0]


def tensors(folder: Path, transform: Any) -> DataLoader[Any]:
    return DataLoader(AsTensors(folder, transform), BATCH, shuffle=True, num_workers=2)


# ---- face landmarks, as PyTorch's data loading tutorial has them ---------------------------------


class Faces(Dataset[Any]):
    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        landmarks = np.random.default_rng(index).uniform(5, 35, (6, 2)).astype(np.float32)
        sample = {"image": pixels(index), "landmarks": landmarks, "number": index}
        return sample if self.transform is None else self.transform(sample)


class CropFace:
    """Crops picture and landmarks, and makes tensors of both."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        image, landmarks = sample["image"], sample["landmarks"]
        height, width = image.shape[:2]
        top, left = 4, 8
        if self.random:
            top = np.random.randint(0, height - SIDE + 1)
            left = np.random.randint(0, width - SIDE + 1)
        image = image[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1)
        moved = landmarks - np.array([left, top], np.float32)
        return sample | {
            "image": torch.from_numpy(image.copy()), "landmarks": torch.from_numpy(moved)
        }  # fmt: skip


def faces(transform: Transform | None) -> DataLoader[Any]:
    return DataLoader(Faces(transform), BATCH, shuffle=True, num_workers=2)


# ---- dicts of which some have a mask -------------------------------------------------------------


class SometimesMasked(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(pixels(index)).permute(2, 0, 1)
        sample = {"image": image, "label": index}
        if index % 3:
            mask = np.array(Image.open(self.folder / "masks" / f"{index:03d}.png"))[:40]
            sample["mask"] = torch.from_numpy(mask)
        return sample


def keys_that_are_there(samples: list[Any]) -> dict[str, Any]:
    batch = default_collate([{k: s[k] for k in ("image", "label")} for s in samples])
    batch["masks"] = [sample.get("mask") for sample in samples]
    return batch


def sometimes_masked(folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(
        SometimesMasked(folder), BATCH, shuffle=True, num_workers=2, collate_fn=keys_that_are_there
    )


def labels(batch: Any) -> list[int]:
    return batch["label"].tolist()


CASES = (
    Pipeline(
        "Oxford Pets, picture and trimap, v2", "torchvision's transforms v2 gallery", write_pets,
        lambda folder, random: pets(folder, BothV2(random).chain),
        whole_sample(lambda folder: pets(folder, None), BothV2), ids=in_masks,
    ),
    Pipeline(
        "Penn-Fudan, boxes and masks, list collate", "torchvision's detection tutorial",
        write_pictures, lambda folder, random: pedestrians(folder, DetectionV2(random)),
        whole_sample(lambda folder: pedestrians(folder, None), DetectionV2),
        ids=lambda batch: [each["image_id"] for each in batch[1]], varying=True,
    ),
    Pipeline(
        "Pascal VOC, wrapped for v2, list collate", "torchvision's transforms v2 gallery",
        write_voc,
        lambda folder, random: voc(folder, VocV2(random).chain),
        whole_sample(lambda folder: voc(folder, None), VocV2), ids=in_annotations, varying=True,
    ),
    Pipeline(
        "Carvana, picture and mask, albumentations", "U-Net tutorials", write_pictures,
        lambda folder, random: cars(folder, WithAlbumentations(random)),
        whole_sample(lambda folder: cars(folder, None), WithAlbumentations), ids=in_masks,
        packages=("albumentations",),
    ),
    Pipeline(
        "picture and mask, kornia", "kornia's data augmentation tutorials", write_pictures,
        lambda folder, random: tensors(folder, WithKornia(random)),
        whole_sample(lambda folder: tensors(folder, None), WithKornia), ids=in_masks,
        packages=("kornia",),
    ),
    Pipeline(
        "face landmarks as dicts of arrays", "PyTorch's data loading tutorial", nothing,
        lambda _folder, random: faces(CropFace(random)),
        whole_sample(lambda _folder: faces(None), CropFace),
        ids=lambda batch: batch["number"].tolist(), content=lambda batch: batch["landmarks"],
    ),
    Pipeline(
        "dicts, some without a mask", "PyTorch forums", write_pictures, sometimes_masked,
        ids=labels, content=lambda batch: batch["image"], random=False, varying=True,
    ),
)  # fmt: skip
