"""A transform of a Hugging Face data set, taken apart: its columns are cached, and it is redone.

    dataset.with_transform(f)      dataset[i] = f({"image": [picture], "label": [3]}), one of each
    -------------------------
    cached                         {"image": picture, "label": 3}, as the data set decodes it
    redone at every serve          f, for one sample

`f` may be random, and it gets what the data set would have given it. Columns that the format leaves
out are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowTransform:
    """A transform of a batch of rows, for one row."""

    transform: Callable[[dict[str, list[Any]]], Mapping[str, Any]]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        made = self.transform({name: [value] for name, value in row.items()})
        return {name: values[0] for name, values in made.items()}


def take_transform(dataset: Any) -> tuple[Any, RowTransform] | None:
    """A Hugging Face data set without its transform, and the transform. None: it is no such data
    set, or has no transform."""
    if type(dataset).__module__ != "datasets.arrow_dataset":
        return None
    format_ = dataset.format
    if format_["type"] != "custom" or "transform" not in format_["format_kwargs"]:
        return None
    kept = {name: format_[name] for name in ("columns", "output_all_columns")}
    return dataset.with_format(None, **kept), RowTransform(format_["format_kwargs"]["transform"])
