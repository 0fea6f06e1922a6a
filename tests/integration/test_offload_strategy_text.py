"""Text in the batches that are evaluated under OffloadStrategy: handed on, or looked at."""

from collections import UserDict
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_evaluation
from support import offload_lightning as ol
from support.offload_evaluation import HOST, run
from torch import nn
from torch.utils.data import DataLoader

from offload import CaptureError
from trainers import OffloadStrategy

captures = offload_evaluation.captures
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


# ---- in training --------------------------------------------------------------------------------


class Trained(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch["x"]), batch["y"])
        return {"loss": loss, "name": batch["name"], "id": batch["id"]}


class TrainedByKind(Trained):
    """Reads a number of the batch, which is one of two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        return {**found, "loss": found["loss"] * (1 + batch["id"] % 2)}


class Names(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trainer: Any, module: Any, outputs: Any, *_: Any
    ) -> None:
        self.seen.append((outputs["name"], outputs["id"]))


def trained(make: Any, strategy: Any = "auto") -> tuple[ol.Result, list[Any]]:
    x, y = ol.data(24).dataset.tensors  # type: ignore[attr-defined]
    named = [
        {"x": x[n : n + 4], "y": y[n : n + 4], "name": f"{n}.jpg", "id": n // 4 % 3}
        for n in range(0, 24, 4)
    ]
    loader: Any = DataLoader(named, batch_size=None)  # type: ignore[arg-type]
    names = Names()
    result = ol.train(strategy, make, loader=loader, callbacks=[names], validate=False)
    return result, names.seen


def test_names_and_ids_that_a_training_step_hands_on_need_one_graph() -> None:
    strategy = OffloadStrategy(budget="60%")
    theirs, ours = trained(Trained), trained(Trained, strategy)
    assert ol.differences(theirs[0], ours[0]) == []
    assert theirs[1] == ours[1] and ours[1][1] == ("4.jpg", 1)
    assert len(strategy.plans) == 1


@pytest.mark.filterwarnings("ignore:.*3 times, because the step reads text or numbers of the batch")
def test_text_beside_a_number_that_a_training_step_reads_is_refused_if_it_is_always_another() -> (
    None
):
    with pytest.raises(CaptureError, match="training_step reads the text of the batch"):
        trained(TrainedByKind, OffloadStrategy(budget="60%"))
