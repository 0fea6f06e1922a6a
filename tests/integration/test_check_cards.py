"""`strategy.check` and `OffloadStrategy.estimate`: a module on cards that are not here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import offload_lightning as ol

from offload.estimating.card import CARDS, CardError, read_card
from offload.estimating.estimate import Estimate
from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.usefixtures("core"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]


def check(*cards: str, strategy: OffloadStrategy | None = None, **given: Any) -> Estimate:
    return (strategy or OffloadStrategy()).check(ol.Module(), ol.data(), cards, **given)


def test_cards_are_named_or_files() -> None:
    made = check("rtx4090", "2xh100", str(CARDS / "l4.json"))
    assert [(each.card, each.devices) for each in made.cards] == [
        ("rtx4090", 1), ("2xh100", 2), ("l4", 1),
    ]  # fmt: skip
    assert all(each.found.fits_whole and each.found.whole.seconds > 0 for each in made.cards)
    assert made.loader is not None and made.loader.seconds > 0


def test_a_file_of_another_torch_is_used_and_said(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    card = json.loads((CARDS / "h200.json").read_text()) | {"name": "other"}
    card["versions"] |= {"torch": "1.0"}
    other.write_text(json.dumps(card))
    made = check(str(other))
    assert "other was measured with torch 1.0" in " ".join(made.table().split())
    assert made.cards[0].error == read_card("h200").error


@pytest.mark.parametrize(
    "price, why",
    [
        ({"h100": 3.0}, "the cards asked for are h200, l4"),
        ({"l4": 1.0}, "price of l4: its file is of a data sheet"),
        ({"h200": 0.0}, "0.0 is no price of an hour"),
        ({"h200": float("nan")}, "nan is no price of an hour"),
    ],
)
def test_a_price_that_means_nothing_is_refused(price: dict[str, float], why: str) -> None:
    with pytest.raises(CardError, match=why):
        check("h200", "l4", price=price)


def test_the_seconds_of_all_accumulated_batches_count() -> None:
    [one], [three] = (
        check("h100", accumulate_grad_batches=count, gradient_clip_val=1.0).cards
        for count in (1, 3)
    )
    assert 1.5 < three.found.whole.seconds / one.found.whole.seconds < 3
    assert three.found.whole.budget >= one.found.whole.budget


def test_several_cards_share_the_micro_batches_of_a_step() -> None:
    def whole(*cards: str) -> list[float]:
        made = check(*cards, strategy=OffloadStrategy(micro_batches=4))
        return [each.found.whole.budget for each in made.cards]

    one, two = whole("l4", "2xl4")
    assert two < one, "each has a part of the weights"


def test_a_card_and_a_cpu_have_kernels_of_their_own(tmp_path: Path) -> None:
    cpu = json.loads((CARDS / "h200.json").read_text()) | {"name": "cpu", "device": "cpu"}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    both = check("h200", str(tmp_path / "cpu.json")).cards
    alone = [check(card).cards[0] for card in ("h200", str(tmp_path / "cpu.json"))]
    assert [each.found for each in both] == [each.found for each in alone]
    assert alone[0].found != alone[1].found


def test_a_budget_below_the_largest_task_is_named_with_the_task() -> None:
    batch = next(iter(ol.data()))
    made = OffloadStrategy.estimate(ol.Module(), batch, "l4", budget="4KiB")
    assert made.cards[0].fits == "no" and made.cards[0].found.largest_task in made.table()
    assert OffloadStrategy.estimate(ol.Module(), batch, "l4").cards[0].fits == "whole"


def test_a_card_with_more_memory_is_never_slower() -> None:
    batch, module = next(iter(ol.data(256, 128))), ol.Module()

    def seconds(budget: int) -> float:
        [card] = OffloadStrategy.estimate(module, batch, "l4", budget=budget).cards
        return float("inf") if card.within is None else card.within.seconds

    whole = OffloadStrategy.estimate(module, batch, "l4").cards[0].found
    room = whole.whole.budget - whole.smallest
    found = [seconds(whole.smallest + room * part // 8) for part in range(2, 10)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < float("inf")


def test_a_module_on_meta_is_estimated_as_a_real_one_and_stays_there() -> None:
    with torch.device("meta"):
        module = ol.Module()
    batch = next(iter(ol.data()))
    on_meta = OffloadStrategy.estimate(module, batch, "l4").cards
    assert on_meta == OffloadStrategy.estimate(ol.Module(), batch, "l4").cards
    assert {p.device.type for p in module.parameters()} == {"meta"}
