"""`strategy.check` and `OffloadStrategy.estimate`: a module on cards that are not here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import offload_lightning as ol

from offload.estimating.card import CARDS, CardError, read_card
from offload.estimating.estimate import Estimate
from offload.estimating.on_cards import price_step, read_cards
from trainers import OffloadStrategy
from trainers.offloading.shadow_fit import record_update

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


def write_card(folder: Path, stem: str, **changed: Any) -> str:
    """Write the file of an H200 with other values; return its path."""
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(json.loads((CARDS / "h200.json").read_text()) | changed))
    return str(path)


def test_two_different_cards_of_one_name_are_refused(tmp_path: Path) -> None:
    slow = write_card(tmp_path, "slow", memory_rate=1e10)
    with pytest.raises(CardError, match="two different cards are named h200"):
        check("h200", slow)
    one, same, several = check("h200", "1xh200", f"2x{slow}").cards
    assert one == same and several.card == "2xh200"


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_the_module_and_the_random_numbers_are_left_alone() -> None:
    module, batches = ol.Module(), [next(iter(ol.data()))]
    module.eval()
    module.head.weight.grad = torch.ones_like(module.head.weight)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    addresses, drawn = [p.data_ptr() for p in module.parameters()], torch.get_rng_state()
    OffloadStrategy().check(module, batches, ["h200", "2xl4"], precision="bf16-mixed")
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert torch.equal(module.head.weight.grad, torch.ones_like(module.head.weight))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not module.training and module.device == torch.device("cpu")


def test_a_file_of_another_torch_is_used_and_said(tmp_path: Path) -> None:
    made = check(write_card(tmp_path, "other", name="other", versions={"torch": "1.0"}))
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
    group = read_cards(["2xl4"])
    options = {"devices": 2, "micro_batches": 4}
    [graph] = record_update(ol.Module(), ol.data(), "cuda:0", (8, 9), options)
    [placed] = price_step(graph, group)
    assert {task.device for task in placed.tasks if task.seconds} == {0, 1}


def test_a_card_and_a_cpu_have_kernels_of_their_own(tmp_path: Path) -> None:
    cpu = write_card(tmp_path, "cpu", name="cpu", device="cpu")
    both = check("h200", cpu).cards
    alone = [check(card).cards[0] for card in ("h200", cpu)]
    assert [each.found for each in both] == [each.found for each in alone]
    assert alone[0].found != alone[1].found


def test_a_budget_below_the_largest_task_is_named_with_the_task() -> None:
    batch = next(iter(ol.data()))
    made = OffloadStrategy.estimate(ol.Module(), batch, "l4", budget="4KiB")
    assert made.cards[0].fits == "no" and made.cards[0].found.largest_task in made.table()
    assert OffloadStrategy.estimate(ol.Module(), batch, "l4").cards[0].fits == "whole"


def test_a_budget_that_makes_the_step_smaller_is_kept() -> None:
    batch = next(iter(ol.data(256, 128)))
    [whole] = OffloadStrategy.estimate(ol.Module(), batch, "l4").cards
    budget = (whole.found.smallest + whole.found.whole.budget) // 2
    [card] = OffloadStrategy.estimate(ol.Module(), batch, "l4", budget=budget).cards
    assert card.within is not None and card.within.budget <= budget
    assert card.fits not in ("whole", "no")
    assert card.within.seconds >= whole.found.whole.seconds


def test_of_cards_with_equal_rates_one_with_more_memory_is_never_slower(tmp_path: Path) -> None:
    loader, bare = ol.data(4096, 2048), {"fixed": 0, "shares": {}}

    def write(name: str, **changed: Any) -> str:
        return write_card(tmp_path, name, name=name, context_bytes=0, workspaces=bare, **changed)

    found = OffloadStrategy().check(ol.Module(), loader, [write("large")]).cards[0].found
    room = found.whole.budget - found.smallest
    sizes = [found.smallest + room * part // 8 for part in range(-1, 10)]
    files = [write(f"of_{size}", memory_bytes=size) for size in sizes]
    cards = OffloadStrategy().check(ol.Module(), loader, files).cards
    seconds = [float("inf") if c.within is None else c.within.seconds for c in cards]
    assert seconds == sorted(seconds, reverse=True)
    assert len({*seconds}) > 3, "memory makes a difference"
    assert cards[0].fits == "no" and cards[-1].fits == "whole"
    assert {card.found.whole for card in cards} == {found.whole}


def test_a_module_on_meta_is_estimated_as_a_real_one_and_stays_there() -> None:
    with torch.device("meta"):
        module = ol.Module()
    batch = next(iter(ol.data()))
    on_meta = OffloadStrategy.estimate(module, batch, "l4").cards
    assert on_meta == OffloadStrategy.estimate(ol.Module(), batch, "l4").cards
    assert {p.device.type for p in module.parameters()} == {"meta"}
