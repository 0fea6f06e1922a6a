"""What happens in the middle of a group of micro-batches: a stop, an error, a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import offload_groups
from support import offload_lightning as ol
from support.offload_groups import Module, plain, together, train

from offload import MemoryTooSmall, Runner
from trainers import OffloadStrategy

taken_where_it_can_be = offload_groups.taken_where_it_can_be
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


class Stops(Module):
    """In the middle of a group, as a signal would."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.trainer.fit_loop.epoch_loop.total_batch_idx == 18:
            self.trainer.should_stop = True
        return batch


def test_a_run_that_stops_in_the_middle_of_a_group_has_run_what_came() -> None:
    options = {"make": Stops, "accumulate_grad_batches": 4}
    ours = train(OffloadStrategy(budget="60%"), **options)
    assert together(ours) == {4, 3}
    assert ol.differences(train(**options), ours) == []


def test_arenas_that_the_machine_refuses_leave_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(runner: Runner, plan: Any, key: Any = None, stage: Any = None) -> Any:
        raise MemoryTooSmall("no memory", needed=2, left=1)

    monkeypatch.setattr(Runner, "move_to", refuse)
    ours = train(OffloadStrategy(budget="60%"))
    assert together(ours) == set()
    assert "one by one: together: no memory" in ours.strategy.explain()
    assert ol.differences(plain("2"), ours) == []


class SavesItself(Module):
    """In the middle of a group, from where nobody would think of it."""

    file = Path()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.trainer.fit_loop.epoch_loop.batch_idx == 7:
            self.trainer.save_checkpoint(self.file)
        return batch


def test_a_checkpoint_in_the_middle_of_a_group_has_what_came_before_it(tmp_path: Path) -> None:
    found = []
    for name, strategy in (
        ("ours", OffloadStrategy(budget="60%")),
        ("theirs", "auto"),
    ):
        SavesItself.file = tmp_path / name
        result = train(strategy, make=SavesItself, accumulate_grad_batches=3)
        found.append((result, torch.load(SavesItself.file, weights_only=False)))
    (ours, one), (theirs, other) = found
    assert together(ours) == {3, 2}
    assert ol.differences(theirs, ours) == []
    for part in ("state_dict", "optimizer_states", "loops", "global_step"):
        assert ol._unequal(part, other[part], one[part]) == []


def test_an_error_in_the_middle_of_a_group_leaves_the_last_steps_weights() -> None:
    class Fails(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.training and self.trainer.fit_loop.epoch_loop.total_batch_idx == 18:
                raise RuntimeError("no more")
            return batch

    modules = []

    def make() -> Module:
        modules.append(Fails())
        return modules[-1]

    for strategy in (OffloadStrategy(budget="60%"), "auto"):
        with pytest.raises(RuntimeError, match="no more"):
            train(strategy, make=make, accumulate_grad_batches=4)
    parameters = [dict(module.named_parameters()) for module in modules]
    assert ol._unequal("", *parameters) == []
