"""The kinds of values in a YAML, and the base classes of its sections."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from offload.sizes import is_share, parse_share, parse_size


def unknown(what: str, got: str, known: tuple[str, ...]) -> str:
    """Return the sentence for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(got, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} '{got}'; {hint}"


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
            own = changed(self) - {"class_path", "init_args"}
            if own:
                raise ValueError(no_effect(own, "beside class_path"))
        return self
