"""Text in the batches that are evaluated under OffloadStrategy: handed on, or looked at."""

import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainers import OffloadStrategy

sys.path.insert(0, str(Path(__file__).parent))
import offload_lightning as ol
from offload_evaluation import HOST, captures, run

one_thread, captures = ol.one_thread, captures
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


class Named(ol.Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"out": self(batch["x"]), "name": batch["name"], "as": [batch["name"][0], "text"]}


class Chooses(Named):
    """Looks at the text, which is one of two."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"]) * (2 if batch["kind"] == "even" else 1)


class Spells(Named):
    """Looks at text that is another in every batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"]), "-".join(batch["name"])


def named(kind: Any = dict) -> DataLoader[Any]:
    x, _ = ol.data(24).dataset.tensors  # type: ignore[attr-defined]
    counter = iter(range(100))

    def put(items: Any) -> Any:
        n = next(counter)
        name = [f"picture {n} {i}.jpg" for i in range(len(items))]
        parity = "odd" if n % 2 else "even"
        return kind({"x": torch.stack(items), "name": name, "kind": parity})

    return DataLoader(x, 3, collate_fn=put)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_text_that_is_handed_on_is_that_of_its_batch_with_one_graph(
    kind: Any, captures: list[str]
) -> None:
    ours, _ = run("predict", OffloadStrategy(budget="60%"), Named, loaders=named(kind))
    theirs, _ = run("predict", "auto", Named, loaders=named(kind))
    assert ol._unequal("", ours, theirs) == []
    assert ours[5]["name"][1] == "picture 5 1.jpg" and type(ours[5]["name"][1]) is str
    assert len(captures) == 1


def test_text_that_is_looked_at_has_graphs_of_its_own_or_none_if_it_is_always_another() -> None:
    for make, said in (
        (Chooses, ""),
        (Spells, "predict_step reads the text of the batch, which differs from batch to batch"),
    ):
        loaders = (named(), named())
        if make is Chooses:  # nothing but the kind differs
            for loader in loaders:
                loader.collate_fn = kinds(loader.collate_fn)
            ours, _ = run("predict", OffloadStrategy(budget="60%"), make, loaders=loaders[0])
        else:
            with pytest.warns(UserWarning, match=f"predicts {HOST}: {said}"):
                ours, _ = run("predict", OffloadStrategy(budget="60%"), make, loaders=loaders[0])
        theirs, _ = run("predict", "auto", make, loaders=loaders[1])
        assert ol._unequal("", ours, theirs) == []


def kinds(collate: Any) -> Any:
    return lambda items: {k: v for k, v in collate(items).items() if k != "name"}
