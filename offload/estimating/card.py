"""What a card file says: how much memory a card has, and its rates by class of work.

    offload/cards/h200.json   --read_card("h200")-->   Card

source "measured": perfect-card made the file on such a card. source "sheet": the vendor's peaks,
so that a price is the least that a step takes. A share that is left out is the whole peak.
"""

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from offload.errors import OffloadError
from offload.estimating.operator_class import OperatorClass

CARDS = Path(__file__).parents[1] / "cards"
Dtype = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
Rate = Annotated[float, Field(gt=0, le=1e18)]
Bytes = Annotated[int, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(gt=0, le=100)]
"""Caches of a CPU are some times as fast as its memory."""
Point = tuple[Rate, Share]


def _check_growing(points: tuple[Point, ...]) -> tuple[Point, ...]:
    if any(one[0] >= next[0] for one, next in pairwise(points)):
        raise ValueError("give points of growing size")
    return points


Points = Annotated[tuple[Point, ...], Field(min_length=1), AfterValidator(_check_growing)]
Curve = Share | Points
"""A share of the peak, or shares by the operations or bytes of a call: [[size, share], ...]."""


class CardError(OffloadError, ValueError):
    """There is no such card, or its file is not valid.

    Correct the key that the message names, or give one of the names that it lists.
    """


class CardPart(BaseModel):
    """A part of a card file, which has these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class CardLinks(CardPart):
    """Bytes per second of copies."""

    h2d: Rate
    d2h: Rate
    d2d: Rate
    shared: Annotated[float, Field(gt=0, le=1)]
    """The share of its rate that a direction keeps while the other one copies."""
    copy_seconds: Annotated[float, Field(ge=0, le=1)]
    """The least seconds of a copy."""


class CardHost(CardPart):
    """The machine that such a card is in."""

    memory_bytes: Bytes
    memory_rate: Rate
    """Bytes per second of one worker that updates parameters on the host."""
    workers: Annotated[int, Field(ge=1, le=4096)]


class CardWorkspaces(CardPart):
    """Bytes that libraries take besides what a call returns."""

    fixed: Bytes
    """Of all calls together."""
    shares: Mapping[OperatorClass, Share]
    """By class of work: the share of the bytes that a call reads and writes."""


class CheckStep(CardPart):
    """A whole step that was predicted by the file's rates and measured on the card."""

    name: str
    predicted: Rate
    measured: Rate


class Card(CardPart):
    """One card file."""

    name: str
    title: str
    source: Literal["measured", "sheet"]
    where: Mapping[str, str]
    """By key: where its numbers come from."""
    device: Literal["cuda", "cpu"]
    capability: str
    versions: Mapping[str, str]
    memory_bytes: Bytes
    context_bytes: Bytes
    """What the driver and its libraries keep of the memory."""
    l2_bytes: Bytes
    memory_rate: Rate
    launch_seconds: Annotated[float, Field(gt=0, le=1)]
    products: Annotated[Mapping[Dtype, Rate], Field(min_length=1)]
    """By dtype: the most operations per second."""
    flops_shares: Mapping[OperatorClass, Curve]
    """By class: the share of the products' rate that it reaches."""
    bytes_shares: Mapping[OperatorClass, Curve]
    """By class: the share of the memory's rate that it reaches."""
    links: CardLinks
    host: CardHost
    workspaces: CardWorkspaces
    checks: tuple[CheckStep, ...]

    @model_validator(mode="after")
    def _check_together(self) -> "Card":
        if unknown := sorted({*self.where} - {*type(self).model_fields}):
            raise ValueError(f"where names {unknown[0]}, which is no key")
        if self.context_bytes >= self.memory_bytes:
            raise ValueError("context_bytes is not below memory_bytes")
        if self.is_measured and not (self.checks and "torch" in self.versions):
            raise ValueError("a measured card needs checks, and versions with torch")
        return self

    @property
    def is_measured(self) -> bool:
        return self.source == "measured"

    @property
    def error(self) -> float | None:
        """How far off a prediction may be, as a share: the worst check step. None for a sheet,
        whose seconds are the least that a step takes."""
        off = [abs(check.predicted / check.measured - 1) for check in self.checks]
        return max(off) if self.is_measured else None

    def flops_of(self, kind: OperatorClass, dtype: str, flops: float, tf32: bool = False) -> float:
        """Operations per second of a call of this class."""
        by_cudnn = kind.startswith("convolution") or kind == "recurrent"
        if dtype == "float32" and "tf32" in self.products and (tf32 or by_cudnn):
            dtype = "tf32"  # cuDNN uses it by default
        rates: Mapping[str, float] = {**self.products}
        if dtype not in rates:
            raise CardError(
                f"card {self.name} has no rate of {dtype} products, and the step has a"
                f" {kind} of {dtype}: add {dtype} to products in its file, or use one of"
                f" {', '.join(self.products)}"
            )
        return rates[dtype] * share_at(self.flops_shares.get(kind, 1.0), flops)

    def bytes_of(self, kind: OperatorClass, nbytes: int) -> float:
        """Bytes per second of a call of this class."""
        return self.memory_rate * share_at(self.bytes_shares.get(kind, 1.0), nbytes)

    def moved_of(self, nbytes: int) -> int:
        """Bytes of a call that surely come from the memory. A sheet knows no rate of the L2 cache,
        so what that may hold takes no time; a measured share has its help in it."""
        return nbytes if self.is_measured else max(0, nbytes - self.l2_bytes)

    def remarks(self, torch_version: str) -> list[str]:
        """What a reader of a price should know. `torch_version`: of the torch that is installed."""
        if not self.is_measured:
            return [f"{self.name}: the vendor's peak rates, so a step takes at least these seconds"]
        lines = []
        made_by = self.versions.get("torch", "")
        if made_by != torch_version:
            lines.append(
                f"{self.name} was measured with torch {made_by}, and this is {torch_version}:"
                " kernels may differ; perfect-card measure makes a file on such a card"
            )
        return lines


def share_at(curve: Curve, size: float) -> float:
    """The share for a call of this size: between two points it is on the line of the logarithms."""
    if not isinstance(curve, tuple):
        return curve
    if size <= curve[0][0]:
        return curve[0][1]
    for (below, low), (above, high) in pairwise(curve):
        if size <= above:
            along = math.log(size / below) / math.log(above / below)
            return low * (high / low) ** along
    return curve[-1][1]


def card_names() -> list[str]:
    """The cards that there are files of."""
    return sorted(path.stem for path in CARDS.glob("*.json"))


def read_card(name: str | Path) -> Card:
    """Read a card by its name, or from a file by a path that ends in .json."""
    if str(name).endswith(".json"):
        return _read_file(Path(name))
    names = card_names()
    if name not in names:
        close = get_close_matches(str(name).lower(), names, 1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise CardError(
            f"there is no card {str(name)!r}.{meant} Give a file.json of perfect-card measure, or"
            f" one of {', '.join(names)}"
        )
    return _read_file(CARDS / f"{name}.json")


def _read_file(path: Path) -> Card:
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text, object_pairs_hook=_refuse_twice)
        return Card.model_validate_json(text)
    except ValidationError as error:
        raise CardError("\n".join(_lines(path, error))) from error
    except (OSError, ValueError) as error:
        raise CardError(
            f"{path} is no card file: {error}. perfect-card measure makes one"
        ) from error


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"the key {twice[0]} stands twice")


def _lines(path: Path, error: ValidationError) -> list[str]:
    """A line a fault: the key, its value, what to do."""
    lines = []
    for fault in error.errors(include_url=False):
        inner = [str(part) for part in fault["loc"] if "-" not in str(part)]  # kinds of a union
        key = ".".join(inner)
        given = "" if fault["type"] in ("missing", "value_error") else f" is {fault['input']!r}"
        lines.append(f"{path}: {key}{given}: {fault['msg']}")
    return lines
