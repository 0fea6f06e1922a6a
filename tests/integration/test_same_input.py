"""Which loaders are read together, where a job joins, and what nobody waits for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.loader_datasets import served
from support.shared_streams import BATCH, BATCHES, SIZE, Counted, lone, passes

from loaders import ReuseLoader
from loaders.sharing.shared_view import SharedView
from trainers.fleet.inputs import shared_inputs
from trainers.fleet.inputs.shared_inputs import LoaderContents, SharedInputs


def twice(images: torch.Tensor, draws: Any) -> torch.Tensor:
    return images.float() * 2


def half(images: torch.Tensor, draws: Any) -> torch.Tensor:
    return images.float() / 2


class Handle(Counted):
    """Has something that cannot be told."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.numbers = (number for number in range(3))


def drawing() -> ReuseLoader:
    numbers = torch.Generator().manual_seed(1)
    return lone(sampler=torch.utils.data.RandomSampler(range(SIZE), generator=numbers))


PAIRS: dict[str, tuple[Callable[[], ReuseLoader], Callable[[], ReuseLoader], bool]] = {
    "equal": (lone, lone, True),
    "equal augmentation": (lambda: lone(augment=twice), lambda: lone(augment=twice), True),
    "another augmentation": (lambda: lone(augment=twice), lambda: lone(augment=half), False),
    "another seed": (lone, lambda: lone(seed=1), False),
    "another batch size": (lone, lambda: lone(batch_size=6), False),
    "other data": (lone, lambda: lone(dataset=Counted(SIZE, (3,))), False),
    "no certainty: a handle": (
        lambda: lone(dataset=Handle(SIZE)),
        lambda: lone(dataset=Handle(SIZE)),
        False,
    ),
    "no certainty: a generator": (drawing, drawing, False),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_only_loaders_that_are_equal_for_certain_are_the_same_input(pair: str) -> None:
    one, other, same = PAIRS[pair]
    contents = [LoaderContents(make(), None).hash_contents() for make in (one, other)]
    assert contents[0].same_as(contents[1]) is same


def told(batch: Any) -> tuple[tuple[int, ...], bytes]:
    pictures, labels = batch
    return tuple(labels.tolist()), pictures.numpy().tobytes()


class Jobs:
    """Views of one loader for jobs on one thread, which refuse to wait."""

    def __init__(self, **options: Any) -> None:
        self.inputs = SharedInputs()
        self.loader = lone(**options)
        self.waits: list[tuple[str, ...]] = []

    def view(self, job: str, state: dict[str, Any] | None = None) -> SharedView:
        view = self.inputs.view(job, self.loader, self.loader, self._wait)
        if state is not None:
            view.load_state_dict(state)
        return view

    def _wait(self, jobs: tuple[str, ...]) -> bool:
        self.waits.append(jobs)
        self.inputs.rest(jobs)  # as if they did not come
        return True

    def streams(self, *jobs: str) -> int:
        return len({self.inputs.label(job) for job in jobs})


def state_at(batch: int) -> dict[str, Any]:
    with lone() as loader:
        served(loader, batch)
        return loader.state_dict()


def test_jobs_that_resume_near_each_other_share_and_one_behind_meets_them_a_pass_later() -> None:
    with lone() as expected:
        whole = passes(expected, 3)
    jobs = Jobs()
    near, ahead = jobs.view("near", state_at(2)), jobs.view("ahead", state_at(4))
    behind = jobs.view("behind", state_at(1))
    iterators = [iter(view) for view in (near, ahead, behind)]
    for iterator in iterators:
        next(iterator)
    assert jobs.streams("near", "ahead") == 1
    assert jobs.streams("near", "behind") == 2
    for view, iterator in zip((near, ahead, behind), iterators, strict=True):
        for _ in iterator:
            pass
        assert view.position.pass_index == 1
    assert [served(view) for view in (near, ahead, behind)] == [whole[BATCHES : 2 * BATCHES]] * 3
    assert jobs.streams("near", "ahead", "behind") == 1
    assert jobs.waits == []
    assert [passes(view, 1) for view in (behind, near, ahead)] == [whole[2 * BATCHES :]] * 3
    jobs.inputs.close()


def test_nobody_waits_for_a_job_that_rests_and_its_bits_stay_those_of_a_lone_loader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_inputs, "WINDOW", 2)
    with lone() as expected:
        whole = passes(expected, 3)
    jobs = Jobs()
    fast, slow = jobs.view("fast"), jobs.view("slow")
    first = iter(slow)
    resting = [told(next(first))]
    assert passes(fast, 2) == whole[: 2 * BATCHES]
    assert jobs.waits == [("slow",)]
    resting += map(told, first)
    assert resting == whole[:BATCHES]
    assert "slow reads pass 0 alone from batch 1 on" in caplog.text
    caplog.clear()
    assert passes(slow, 2) == whole[BATCHES:]
    assert "alone" not in caplog.text, "from the next pass on it has a stream of its own"
    jobs.inputs.close()


def test_a_job_whose_passes_are_served_otherwise_reads_them_apart_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with lone() as expected:
        expected.set_reuse(2)
        whole = passes(expected, 2)
    jobs = Jobs()
    plain, again = jobs.view("plain"), jobs.view("again")
    again.set_reuse(2)
    with lone() as other:
        assert passes(plain, 1) == passes(other, 1)
    assert passes(again, 2) == whole
    assert jobs.streams("plain", "again") == 2
    assert "alone" not in caplog.text
    jobs.inputs.close()


def test_batches_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = BATCH * (3 * 8 * 8 + 8)
    monkeypatch.setattr(shared_inputs, "KEPT_BYTES", 3 * nbytes)
    jobs = Jobs()
    fast, slow = iter(jobs.view("fast")), iter(jobs.view("slow"))
    next(fast), next(slow)
    assert jobs.inputs.room("fast") + jobs.inputs.room("slow") == 3 * nbytes
    for _ in range(3):
        next(fast)
    assert jobs.waits == []
    next(fast)
    assert jobs.waits == [("slow",)]
    jobs.inputs.close()
