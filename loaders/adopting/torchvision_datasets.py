"""torchvision's data sets: how each of them reads a sample. None of them is imported."""

from typing import Any, cast

from loaders.adopting.torchvision_steps import Size

NOT_ONE_PICTURE = frozenset(
    {"HMDB51", "Kinetics", "LFWPairs", "LSUN", "MovingMNIST", "PhotoTour", "UCF101"}
)
"""Their samples are videos or pairs, or come from a data set inside."""
READ_TRANSFORMS = frozenset(
    {"Cityscapes", "CocoDetection", "Kitti", "OxfordIIITPet", "Places365", "SBDataset"}
    | {"VOCDetection", "VOCSegmentation"}
)
"""They apply `.transforms` (picture, target), and not `.transform`."""
SAFE_IN_THREADS = frozenset(
    {"CIFAR10", "DatasetFolder", "MNIST", "QMNIST", "STL10", "SVHN", "USPS"}
)
"""Several threads may read them: they look into arrays, or open a file of its own for a sample.
(FakeData draws from torch's generator, which all threads share.)"""


def torchvision_reader(dataset: Any) -> str | None:
    """The class of torchvision whose [i] reads this data set. None: the user wrote its [i]."""
    reader = getattr(type(dataset), "__getitem__", None)
    if not f"{getattr(reader, '__module__', '')}.".startswith("torchvision.datasets."):
        return None
    return cast(Any, reader).__qualname__.split(".")[0]


def known_size(dataset: Any, owner: str) -> Size | None:
    """The height and width of its pictures, where all have the same."""
    match owner:
        case "CIFAR10" | "MNIST" | "QMNIST":
            return _sides(dataset.data, 1)
        case "STL10" | "SVHN":
            return _sides(dataset.data, 2)
        case "FakeData":
            return dataset.image_size[1], dataset.image_size[2]
        case _:
            return None


def _sides(data: Any, first: int) -> Size | None:
    """The height and width of the pictures in an array that has them from dimension `first` on."""
    shape = getattr(data, "shape", ())
    return (shape[first], shape[first + 1]) if len(shape) > first + 1 else None
