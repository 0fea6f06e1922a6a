"""A transform of a Hugging Face data set, taken apart: its columns are cached, and it is redone.

    dataset.with_transform(f)      dataset[i] = f({"image": [picture], "label": [3]}), one of each
    -------------------------
    cached                         {"image": picture, "label": 3}, as the data set decodes it
    redone at every serve          f, for one sample

`f` may be random, and it gets what the data set would have given it. What it leaves out of a sample
(columns of the format) is not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OfOneRow:
    """A transform of a batch of rows, for one row."""

    transform: Callable[[dict[str, list[Any]]], Mapping[str, Any]]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        made = self.transform({name: [value] for name, value in row.items()})
        return {name: values[0] for name, values in made.items()}


def taken_apart(dataset: Any) -> tuple[Any, OfOneRow] | None:
    """A Hugging Face data set without its transform, and the transform. None: it is none, or has
    none."""
    if type(dataset).__module__ != "datasets.arrow_dataset":
        return None
    told = dataset.format
    if told["type"] != "custom" or "transform" not in told["format_kwargs"]:
        return None
    kept = {"columns": told["columns"], "output_all_columns": told["output_all_columns"]}
    return dataset.with_format(None, **kept), OfOneRow(told["format_kwargs"]["transform"])
