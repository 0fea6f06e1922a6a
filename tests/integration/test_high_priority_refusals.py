"""Nets that cannot be served beside a training as they are: what is said, and what stays usable."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.jobs.fleet_jobs import KINDS, QUIET
from offload import BudgetTooSmall, OffloadError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(9))


def served() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)).eval()


def answers_alone(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(X)


def trainer_with(strategy: OffloadStrategy | str) -> L.Trainer:
    return L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_a_net_that_shares_tensors_with_the_training_or_another_guest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = KINDS["adam"].module()
    strategy = OffloadStrategy()
    words = r"shares its tensor 0.weight with the module that this strategy runs.*copy.deepcopy"
    trainer = trainer_with(strategy)
    with strategy.high_priority(module.net), pytest.raises(OffloadError, match=words):
        trainer.fit(module, KINDS["adam"].train(), KINDS["adam"].val())

    def later() -> None:
        with pytest.raises(OffloadError, match=words):
            strategy.high_priority(module.net)
        called.append(True)

    called: list[bool] = []
    monkeypatch.setattr(module, "on_train_epoch_start", later)
    trainer.fit(module, KINDS["adam"].train(), KINDS["adam"].val())
    assert called == [True]
    module.eval()
    with strategy.high_priority(module.net) as serve:  # nobody trains it any more
        assert torch.equal(serve(X), answers_alone(module.net))
        with pytest.raises(OffloadError, match=r"0.weight with another net of high_priority"):
            strategy.high_priority(module.net)


def test_guests_that_do_not_fit_together_are_told_what_is_needed_for_all() -> None:
    kind = KINDS["adam"]

    def validated(budget: int | str, reserve: str) -> object:
        strategy = OffloadStrategy(budget=budget)
        with (
            strategy.high_priority(served(), reserve),
            strategy.high_priority(served(), reserve),
        ):
            return trainer_with(strategy).validate(kind.module(), kind.val(), verbose=False)

    words = r"budget is 1.0 KiB.*budget='17KiB' without the 16.0 KiB that are reserved"
    with pytest.raises(BudgetTooSmall, match=words) as told:
        validated("17KiB", "8KiB")
    assert validated(told.value.needed, "8KiB")
    with pytest.raises(OffloadError, match=r"used up by 1.2 MiB that are reserved for requests"):
        validated("1MiB", "600KiB")


def test_a_net_that_draws_later_than_at_first_is_refused_once() -> None:
    net = served()
    with OffloadStrategy().high_priority(net, seed=4) as serve:
        serve(X)
        net.train()
        with pytest.raises(RuntimeError, match="draws random numbers, and none before it did"):
            serve(X)
        torch.manual_seed(4)
        expected, before = answers_alone(net), torch.get_rng_state()
        assert torch.equal(serve(X), expected)
        assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_tensors_or_of_another_type_leave_the_net_usable() -> None:
    net = served()
    with OffloadStrategy().high_priority(net) as serve:
        with pytest.raises(RuntimeError, match="the same dtype"):
            serve(X.double())
        with pytest.raises(OffloadError, match="input 0 is a list; a tensor is expected"):
            serve([1.0])
        assert torch.equal(serve(X), answers_alone(net))
        with pytest.raises(RuntimeError, match="the same dtype"):
            serve(X.double())
        assert torch.equal(serve(X), answers_alone(net))


def from_another_thread(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns or raises there."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        return asked.exception() or asked.result()


@pytest.mark.parametrize("draws", [True, False])
def test_another_thread_uses_no_generator_of_the_process_while_no_training_runs(
    draws: bool,
) -> None:
    net = served().train(draws)
    with OffloadStrategy().high_priority(net) as serve:
        first = from_another_thread(lambda: serve(X))
        assert isinstance(first, OffloadError)
        assert "because it is the first one: it may draw" in str(first)
        answer = serve(X)
        again = from_another_thread(lambda: serve(X))
        if draws:
            assert isinstance(again, OffloadError)
            assert "because its net draws random numbers" in str(again)
        else:
            assert torch.equal(again, answer)
        assert serve(X).shape == answer.shape  # a refusal gives the device back
