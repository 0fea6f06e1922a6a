"""Steps of `augment:` with a class_path: their order, their draws, and what is refused at load."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from loaders import ReuseLoader
from loaders.pixels.augmentation import CentreCrop
from perfect.assembly.augmentation import build_augmentation, centre_crop, pictures_after
from perfect.config.fields import AugmentConfig
from perfect.config.yaml_reader import read_config
from perfect.errors import ConfigError

V2 = "torchvision.transforms.v2."
INVERT = {"class_path": f"{V2}RandomInvert", "init_args": {"p": 1.0}}
HOLE = {"name": "cutout", "size": 40}
"""It covers the whole picture."""


def steps(*given: dict[str, Any]) -> list[AugmentConfig]:
    return TypeAdapter(list[AugmentConfig]).validate_python([*given])


def transform(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{V2}{name}", "init_args": arguments}


class Pictures:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(index)
        return torch.from_numpy(rng.integers(1, 255, (3, 8, 8), dtype=np.uint8)), index


def serves(*given: dict[str, Any], **options: Any) -> dict[int, list[torch.Tensor]]:
    """What each sample looked like, serve by serve, over one pass."""
    augment = build_augmentation(steps(*given))
    seen: dict[int, list[torch.Tensor]] = {}
    with ReuseLoader(Pictures(), 2, reuse=4, workers=1, augment=augment, **options) as loader:
        for pictures, ids in loader:
            for picture, number in zip(pictures, ids.tolist(), strict=True):
                seen.setdefault(number, []).append(picture)
    return seen


def test_steps_of_ours_and_of_others_run_in_the_order_of_the_yaml() -> None:
    for given, value in (((INVERT, HOLE), 0), ((HOLE, INVERT), 255)):
        for pictures in serves(*given).values():
            assert all((picture == value).all() for picture in pictures)


def test_every_serve_draws_anew_and_a_second_run_draws_the_same() -> None:
    given = (
        {"name": "pad_crop", "padding": 3},
        transform("ColorJitter", brightness=0.9),
        {"name": "flip"},
    )
    once, again, frozen = serves(*given), serves(*given), serves(*given, reaugment=False)
    for number, pictures in once.items():
        assert len({picture.numpy().tobytes() for picture in pictures}) >= 3
        assert torch.equal(torch.stack(pictures), torch.stack(again[number]))
        assert torch.equal(pictures[0].expand(4, -1, -1, -1), torch.stack(frozen[number]))


def test_a_transform_of_albumentations_gets_and_returns_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Transposed:
        def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
            assert image.shape == (8, 8, 3) and image.dtype == np.uint8
            return {"image": image[::-1].transpose(1, 0, 2)}

    Transposed.__module__ = "albumentations.fake"
    module = ModuleType("albumentations")
    monkeypatch.setitem(sys.modules, "albumentations", module)
    monkeypatch.setattr(module, "Transposed", Transposed, raising=False)
    for number, pictures in serves({"class_path": "albumentations.Transposed"}).items():
        turned = Pictures()[number][0].flip(1).transpose(1, 2)
        assert all(torch.equal(picture, turned) for picture in pictures)


def test_evaluation_takes_the_middle_where_training_crops() -> None:
    crop = transform("RandomCrop", size=6)
    assert pictures_after(steps(crop), 8) == ((6, 6), [])
    assert centre_crop(steps(crop), 8) == CentreCrop((6, 6))
    assert centre_crop(steps(INVERT), 8) is None


REFUSED = [
    (transform("RandomInvrt"), "class_path", "has no attribute 'RandomInvrt'"),
    ({"class_path": "nowhere.Flip"}, "class_path", "there is no module 'nowhere'"),
    (transform("RandomInvert", q=1), "init_args", "unexpected keyword argument 'q'; change them"),
    (transform("ColorJitter", brightness=-1), "init_args", "it must be non negative; change them"),
    (
        transform("RandomApply", transforms=[INVERT, transform("Resize")]),
        "init_args.transforms.1.init_args",
        "Resize does not take them: missing a required argument: 'size'",
    ),
    (transform("Normalize", mean=[0.5], std=[1]), "class_path", "fails on a picture (uint8 [3, 8"),
    (transform("Grayscale"), "class_path", "makes uint8 [1, 8, 8] of a picture (uint8 [3, 8, 8])"),
    (transform("RandomResize", min_size=2, max_size=8), "class_path", "pictures of several sizes"),
    ({"class_path": "pathlib.Path"}, "class_path", "cannot be called on a picture"),
]


@pytest.mark.parametrize(("given", "key", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_does_not_fit_is_refused_with_its_key(
    given: dict[str, Any], key: str, said: str
) -> None:
    _, [problem] = pictures_after(steps({"name": "flip"}, given), 8)
    assert problem.key == f"augment.1.{key}"
    assert said in problem.reason


def test_pictures_that_become_larger_than_those_of_evaluation_are_refused() -> None:
    _, [problem] = pictures_after(steps(transform("Resize", size=[9, 8])), 8)
    assert "pictures become 9 x 8, larger than the stored 8 x 8" in problem.reason


def test_worker_processes_have_an_effect_on_data_in_memory_through_own_steps(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    flip, own = "{name: flip}", f"{{class_path: {V2}RandomInvert}}"
    # threads are what data in memory has, and what runs of earlier versions have written out
    for kind, step, refused in (
        ("process", flip, True),
        ("process", own, False),
        ("thread", flip, False),
    ):
        path.write_text(
            "model: {name: pilot}\ndata: {name: cifar10}\nphases: [{name: a, passes: 1}]\n"
            f"loader: {{worker_kind: {kind}}}\naugment: [{step}]\n"
        )
        if refused:
            with pytest.raises(ConfigError, match=r"loader\.worker_kind: has no effect"):
                read_config(path)
        else:
            assert read_config(path)[0].loader.worker_kind == kind
