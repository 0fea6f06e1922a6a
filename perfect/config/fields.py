"""The kinds of values in a YAML, and the base classes of its sections."""

import difflib
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from offload.sizes import is_share, parse_share, parse_size


def unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    """Return the sentence for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} '{name}'; {hint}"


def no_effect(keys: set[str], why: str) -> str:
    """Return the sentence for keys without effect."""
    verb, them = ("has", "it") if len(keys) == 1 else ("have", "them")
    return f"{', '.join(sorted(keys))} {verb} no effect {why}: remove {them}"


Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]  # takes a whole number too, but no text and no true
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Weight = Annotated[Number, Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_size)]


def _as_written(given: object) -> object:
    """Check a size, and return it as it was written."""
    nbytes = parse_size(given)
    return given if isinstance(given, str) else nbytes


def _size_or_share(given: object) -> object:
    if is_share(given):
        parse_share(str(given))
        return given
    try:
        return _as_written(given)
    except ValueError as error:
        raise ValueError(f"{error}, or a share of what the step needs, such as 80%") from None


def _auto_or_ascending(given: object) -> object:
    """Check a list of lengths, or the word auto."""
    if given == "auto":
        return given
    numbers = given if isinstance(given, list) else []
    whole = all(type(number) is int and number > 0 for number in numbers)
    if not numbers or not whole or numbers != sorted(set(numbers)):
        raise ValueError(f"give auto, or lengths in ascending order such as [64, 256], not {given}")
    return given


Lengths = Annotated[Literal["auto"] | list[int], BeforeValidator(_auto_or_ascending)]
Size = Annotated[str | int, BeforeValidator(_as_written)]
Budget = Annotated[str | int, BeforeValidator(_size_or_share)]


def _number_or_range(given: object) -> object:
    least, _, most = given.partition("..") if isinstance(given, str) else ("", "", "")
    is_range = least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)
    if (type(given) is int and given >= 1) or is_range:
        return given
    raise ValueError(f"must be a number of devices or a range such as 1..4, not {given!r}")


JobDevices = Annotated[int | str, BeforeValidator(_number_or_range)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def changed(section: Section) -> set[str]:
    """Return the keys that differ from their defaults. So a complete dump, in which every key is
    given, is treated like the original."""
    return {
        name
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != field.get_default(call_default_factory=True)
    }


class NamedOrOwn(Section):
    """A section that names one of ours by `name`, or the user's class by `class_path`."""

    class_path: str | None = None  # A class of your own, as package.module.Class, in place of name.
    init_args: dict[str, Any] = {}  # The arguments that this class is made with.

    @model_validator(mode="after")
    def _check_name_or_class(self) -> "NamedOrOwn":
        name = getattr(self, "name", None)
        if name is None and self.class_path is None:
            raise ValueError("name is missing: give it, or class_path for a class of your own")
        if name is not None and self.class_path is not None:
            raise ValueError("give either name or class_path, not both")
        if self.class_path is None and self.init_args:
            raise ValueError(no_effect({"init_args"}, "without class_path"))
        if self.class_path is not None:
            idle = changed(self) - {"class_path", "init_args"}
            if idle:
                raise ValueError(no_effect(idle, "beside class_path"))
        return self


class PadCropConfig(Section):
    name: Literal["pad_crop"]  # Pads with zeros, and crops back to the size at a random place.
    padding: Count = 4  # The pixels that are added at each edge.


class FlipConfig(Section):
    name: Literal["flip"]  # Mirrors left and right at random.
    p: Annotated[Number, Field(gt=0, le=1)] = 0.5  # How likely that is.


class CutoutConfig(Section):
    name: Literal["cutout"]  # Sets a random square to 0.
    size: Count = 8  # The square's side in pixels.


class RandomResizedCropConfig(Section):
    name: Literal["random_resized_crop"]  # Resizes a box of random area and shape.
    size: Count  # The side of the result in pixels.
    min_scale: Annotated[Number, Field(gt=0, le=1)] = 0.08  # The smallest area of the box.


class OwnAugmentConfig(NamedOrOwn):
    """A step of torchvision.transforms.v2, of Albumentations, or of your own, which gets a picture
    (uint8 [3, H, W]; for Albumentations image=[H, W, 3]) and returns one. A value in init_args may
    have a class_path too, as the transforms of a RandomApply have.

    It is tried at load, and draws anew at each serve. With one, all steps run picture by picture,
    on the thread that trains or, with loader.worker_kind: process, in worker processes. Evaluation
    crops the middle of its pictures if the steps make smaller ones."""

    name: str | None = None  # Leave it out beside class_path.


OWN = "a class_path"


def name_or_class_path(step: object) -> str | None:
    """Return which kind of step this is."""
    given = step.get if isinstance(step, dict) else partial(getattr, step)
    return OWN if given("class_path", None) is not None else given("name", None)


AugmentConfig = Annotated[
    Annotated[PadCropConfig, Tag("pad_crop")]
    | Annotated[FlipConfig, Tag("flip")]
    | Annotated[CutoutConfig, Tag("cutout")]
    | Annotated[RandomResizedCropConfig, Tag("random_resized_crop")]
    | Annotated[OwnAugmentConfig, Tag(OWN)],
    Discriminator(name_or_class_path),
]
