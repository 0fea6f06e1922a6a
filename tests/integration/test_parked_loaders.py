"""Loaders of jobs that wait for their turns: they decode behind others', and stop nobody."""

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from support.eventually import eventually
from support.loader_datasets import Pictures

from benchmarks.jobs.fleet_jobs import QUIET
from loaders import ReuseLoader, SharedStream, Workers
from loaders.order.serve import Serve
from loaders.workers import prefetcher
from loaders.workers.decode_work import DecodeWork, Done, PassJobs
from loaders.workers.precedence import Precedence, process_workers
from loaders.workers.prefetcher import Prefetcher
from trainers.fleet import Fleet

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]


class Source:
    """A pool, and what its workers read: each read ends when it is let."""

    def __init__(self, slots: int, workers: int, lets: int, behind: bool = False) -> None:
        self.precedence = Precedence()
        self.precedence.gives_way = behind
        self.pool = Prefetcher(slots=slots, workers=workers, precedence=self.precedence)
        self.begun: list[int] = []
        self.let = threading.Semaphore(lets)
        self.pool.begin(self._work())

    def _work(self) -> DecodeWork:
        def read(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
            for position in positions:
                self.begun.append(position)
                assert self.let.acquire(timeout=60)
                done(position)

        return DecodeWork(PassJobs.whole_pass(40), read, lambda _, serve, slots: serve.positions, 1)

    def take(self, position: int) -> Any:
        self.pool.plan(position, Serve(np.array([position]), np.zeros(1, np.int64)))
        return self.pool.take().tolist()

    def close(self) -> None:
        self.let.release(1000)
        self.pool.close()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Source]]:
    """They are closed at the end. A worker takes one sample at a time."""
    monkeypatch.setattr(prefetcher, "MOST_IN_CHUNK", 1)
    made: list[Source] = []
    yield made
    for one in made:
        one.close()
    assert not process_workers.working and not process_workers.waiting


def in_front_and_behind(made: list[Source], workers: int = 2) -> tuple[Source, Source]:
    """The one in front has begun as many samples as it has workers, and may not go on."""
    front = Source(slots=4, workers=2, lets=0)
    made.append(front)
    eventually(lambda: len(front.begun) == 2)
    behind = Source(slots=5, workers=workers, lets=1000, behind=True)
    made.append(behind)
    return front, behind


def test_a_parked_loader_fills_its_buffer_when_the_holders_is_full(sources: list[Source]) -> None:
    front, behind = in_front_and_behind(sources)
    eventually(lambda: len(process_workers.waiting) == 2)
    assert behind.begun == [], "both workers of the holder's loader read"
    front.let.release(4)  # it fills its buffer
    eventually(lambda: sorted(behind.begun) == list(range(5)))
    eventually(lambda: sorted(front.begun) == list(range(4)))
    assert front.take(0) == [0]  # one slot falls free
    eventually(lambda: len(front.begun) == 5)
    eventually(lambda: len(process_workers.working) == 1)
    assert sorted(behind.begun) == list(range(5)), "it is bounded by its own buffer"


def test_whoever_waits_for_a_parked_loader_gets_its_batch(sources: list[Source]) -> None:
    front, behind = in_front_and_behind(sources)
    assert [behind.take(n) for n in range(12)] == [[n] for n in range(12)]
    assert len(front.begun) == 2, "the loader in front has hung all the time"


def test_a_parked_loader_that_comes_to_the_front_waits_no_more(sources: list[Source]) -> None:
    _, behind = in_front_and_behind(sources)
    eventually(lambda: len(process_workers.waiting) == 2)
    behind.precedence.gives_way = False
    eventually(lambda: sorted(behind.begun) == list(range(5)))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_batches_have_the_same_bits_wherever_their_loaders_stand(kind: Any) -> None:
    def made(seed: int) -> ReuseLoader:
        options: dict[str, Any] = {"batch_size": 4, "reuse": 2, "workers": Workers(2, kind)}
        return ReuseLoader(Pictures(40), seed=seed, **options)

    chance = random.Random(3)
    loaders, lone = [made(0), made(1)], [made(0), made(1)]
    wanted = [list(itertools.chain(loader, loader)) for loader in lone]
    got: list[list[Any]] = [[], []]
    both = [itertools.chain(loader, loader) for loader in loaders]
    while len(got[0]) < len(wanted[0]) or len(got[1]) < len(wanted[1]):
        holder = chance.randrange(2)
        for number, loader in enumerate(loaders):
            loader.precedence.gives_way = number != holder or chance.random() < 0.2
        got[holder] += itertools.islice(both[holder], chance.randrange(6))
    for mine, theirs in zip(got, wanted, strict=True):
        for (x, y), (x2, y2) in zip(mine, theirs, strict=True):
            assert torch.equal(x, x2) and torch.equal(y, y2)
    for loader in (*loaders, *lone):
        loader.close()


def test_a_shared_loader_is_behind_while_all_its_views_are() -> None:
    loader = ReuseLoader(Pictures(24), batch_size=4, reuse=1, workers=1)
    apart = loader.apart()
    with SharedStream(loader) as stream, SharedStream(apart) as other:
        views = [stream.view(), stream.view()]
        assert not loader.precedence.gives_way
        views[0].precedence.gives_way = True
        assert not loader.precedence.gives_way
        views[1].precedence.gives_way = True
        assert loader.precedence.gives_way
        views[1].move_to(other)
        assert views[1].precedence.gives_way and apart.precedence.gives_way
        views[0].precedence.gives_way = False
        assert not loader.precedence.gives_way and apart.precedence.gives_way
        views[1].close()
        assert not apart.precedence.gives_way, "nobody is there to give way for"


class Looking(L.LightningModule):
    """Keeps which loaders are behind in each of its steps."""

    def __init__(self, name: str, loaders: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.loaders = name, loaders
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3 * 8 * 8, 1)
        self.seen: list[dict[str, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.train_dataloader is not None:  # a view of a stream
            self.loaders[f"{self.name} train"] = self.trainer.train_dataloader
        self.seen.append({n: one.precedence.gives_way for n, one in self.loaders.items()})
        return self.net(batch[0].flatten(1).float() / 255).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_only_the_loaders_of_the_job_with_the_device_are_in_front(tmp_path: Path) -> None:
    loaders: dict[str, Any] = {}
    trainer = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    jobs = {}
    fleet = Fleet(None, "cpu", folder=tmp_path, quantum=2)

    def loader(key: str) -> ReuseLoader:
        loaders[key] = ReuseLoader(Pictures(24), batch_size=4, reuse=1, workers=1)
        return loaders[key]

    for name in ("a", "b", "c"):
        jobs[name] = Looking(name, loaders)
        train, val = (partial(loader, f"{name} {part}") for part in ("train", "val"))
        fleet.add(name, jobs[name], train=train, val=val, trainer=trainer, offload=False, seed=0)
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}
    parted = dict.fromkeys(("train", "val"), 0)
    for name, job in jobs.items():
        for seen in job.seen:
            assert not any(behind for key, behind in seen.items() if key.startswith(name))
            for part in parted:
                parted[part] += sum(behind for key, behind in seen.items() if key.endswith(part))
        assert len(job.seen) >= 2 * 6
    assert min(parted.values()) > 20, "the loaders of jobs that waited were behind"
    first, *others = ([*job.parameters()] for job in jobs.values())
    for other in others:  # their seeds and data are the same
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for one in loaders.values():
        one.close()
