"""What is known of Hugging Face's streaming data sets, which nobody has to install.

Their state finds any sample again, but for those that wait in a shuffle buffer of their own. They
can be split so that every rank has samples of its own.
"""

import importlib
from typing import Any

BUFFER = "BufferShuffledExamplesIterable"
ITERABLES = "datasets.iterable_dataset"


def is_huggingface(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"


def of_rank(dataset: Any, rank: int, world_size: int) -> Any:
    """The samples of one rank."""
    distributed = importlib.import_module("datasets.distributed")
    return distributed.split_dataset_by_node(dataset, rank, world_size)


def loses_samples(dataset: Any) -> bool:
    """Whether going on from its state would leave out samples: those in its shuffle buffer. It is
    looked for in whatever the data set is made of."""
    known: set[int] = set()
    parts = [dataset]
    while parts:
        part = parts.pop()
        if type(part).__name__ == BUFFER:
            return True
        if id(part) in known or type(part).__module__ != ITERABLES:
            continue
        known.add(id(part))
        for inside in getattr(part, "__dict__", {}).values():
            parts += inside if isinstance(inside, list | tuple) else [inside]
    return False
