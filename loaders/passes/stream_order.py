"""Which samples of a stream this rank serves in each pass, and where a resumed pass goes on.

    known number of samples     the order of a pass is known from the beginning, on every rank
    unknown, one rank           the pass ends where the stream does (`order/open_end`)
    unknown, several ranks      refused: their passes would differ in length, and wait for ever

A state in the middle of a pass holds a place no later than the oldest sample in the buffer. It is
one rank's own; another rank, and a source without places, reads from the beginning and skips.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from loaders.arguments import Serving
from loaders.errors import LoaderError, SourceError, StateError
from loaders.order.keyed_permutation import SourceOrder
from loaders.order.open_end import ENDLESS, walk_stream, with_last
from loaders.order.reuse import ReuseBuffer
from loaders.order.serve import BufferAges, Residents, Serve
from loaders.passes.pass_run import PassEnding, PlannedPass
from loaders.passes.rank_order import LoaderRanks, PassOrders
from loaders.streams.stream_pass import MarkedStretch, StreamPass, StreamTrail, StreamTurn
from loaders.streams.streamed_samples import HOW_MANY, StreamedSamples
from loaders.workers.decode_work import PassJobs, PassOrder

MOST_IDS = 1 << 62

log = logging.getLogger(__name__)


class StreamOrder(PassOrders):
    """The samples of this rank, pass by pass. To a loader it is what a `RankOrder` is."""

    sampler = None

    def __init__(
        self, streamed: StreamedSamples, seed: int, shuffle: bool, ranks: LoaderRanks
    ) -> None:
        self.dataset = streamed
        self.ranks = ranks
        self._seed = seed
        self._shuffle = shuffle
        self._serving: tuple[ReuseBuffer, StreamPass] | None = None
        self._resumed: dict[str, Any] | None = None

    @property
    def in_dataset(self) -> int | None:
        return self.dataset.samples

    @property
    def samples(self) -> int:
        """The samples of a pass on all ranks. Where nobody knows: more than any pass has."""
        return self.in_dataset or ENDLESS

    @property
    def share(self) -> int:
        return self.samples // self.world_size

    def within_share(self, serving: Serving, drop_last: bool) -> Serving:
        """How a pass is served. Refuses a stream that the ranks cannot share."""
        self.dataset.source.check(self.world_size)
        if self.in_dataset is not None and self.in_dataset % self.world_size:
            raise LoaderError(
                f"{self.in_dataset} samples of a pass are no multiple of {self.world_size} ranks:"
                f" give the stream samples={self.share * self.world_size}"
            )
        if self.world_size > 1 and self.in_dataset is None:
            raise LoaderError(
                f"nobody knows how many samples a pass of the stream has, so {self.world_size}"
                " ranks would end theirs at different batches and wait for each other for ever:"
                f" {HOW_MANY}, for all ranks together"
            )
        return super().within_share(serving, drop_last)

    def with_seed(self, seed: int) -> "StreamOrder":
        return StreamOrder(self.dataset, seed, self._shuffle, self.ranks)

    def check_ranks(self, order: PassOrder, batches: int | None) -> str:
        """Refuse a pass that the ranks would not serve alike."""
        if not self.ranks.all_together:
            return ""
        mine = {
            "rank": self.rank,
            "pass": order.pass_index,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self.in_dataset,
            "stream": self.dataset.source.identity,
            "batches": batches,
        }
        everybodys = self.gather_from_ranks(mine)
        for told in everybodys:
            for key in mine:
                if key != "rank" and told[key] != everybodys[0][key]:
                    raise LoaderError(
                        f"the ranks do not share one stream: {key} is {told[key]} on rank"
                        f" {told['rank']}, but {everybodys[0][key]} on rank 0; give every rank the"
                        " same arguments"
                    )
        return ""

    def of_pass(self, pass_index: int) -> PassOrder:
        """No sample of another pass has an id of this one: they may be different samples."""
        first = pass_index * ENDLESS
        places = range(first + self.rank, first + ENDLESS, self.world_size)
        return PassOrder(pass_index, SourceOrder(MOST_IDS, None, places))

    def planned(
        self, plan: ReuseBuffer, order: PassOrder, first: int, batches: int | None
    ) -> PlannedPass:
        """The pass, entered before batch `first`. `batches`: how many there are, or how many there
        may be. The stream is read up to where that batch needs it."""
        told = self._resumed if first else None
        endless = self.in_dataset is None
        here = None if endless else plan.walk(first)
        oldest = _oldest(here[0]) if here else told.get("oldest", 0) if told else 0
        of = self._opened(plan, order.pass_index, oldest, told)
        if here is not None:
            residents, serves = here[0], with_last(here[1])
        else:
            if not of.reaches(plan.batch_size):
                plan = _smaller(plan, of.samples or 0, order.pass_index)
            residents, serves = walk_stream(plan, first, of)
        end = of.samples
        if end is not None and (
            len(replace(plan, samples=end)) <= first or _oldest(residents) < oldest
        ):
            raise StateError(
                f"the saved loader state is that of batch {first} of a pass, but the stream is"
                f" shorter now (samples: {end}): give the stream of that run"
            )
        self._serving = plan, of
        of.forget(residents.entered, residents.positions)
        ending = PassEnding()
        may_follow = range(residents.entered, self.share)
        jobs = PassJobs(residents.positions, may_follow, lambda: of.samples)
        begin = order.pass_index * ENDLESS
        self.dataset.look = lambda number: of.look_at((number - begin) // self.world_size)
        fed = replace(order, fed=lambda read: self.dataset.reading(of, order, read))
        ages = BufferAges.at_entry(residents, plan.reuse)
        numbered = _numbered(serves, first, batches, ending)
        return PlannedPass(fed, plan, jobs, numbered, ages, first, ending)

    def _opened(
        self, plan: ReuseBuffer, pass_index: int, oldest: int, told: dict[str, Any] | None
    ) -> StreamPass:
        """The pass, read up to position `oldest`."""
        turn = StreamTurn(pass_index, self._seed, self._shuffle, self.rank, self.world_size)
        place, at = None, 0
        if told and told.get("place") and told["rank"] == self.rank and told["position"] <= oldest:
            place, at = told["place"], told["position"]
        elif oldest:
            log.info("resuming reads the stream again, up to sample %d", oldest - 1)
        # A sample lives for about `capacity` others, and a batch is planned a few others ahead.
        lag = 6 * plan.capacity + 8 * plan.batch_size
        name = f"pass {pass_index} of the stream on rank {self.rank}"
        promised = None if self.in_dataset is None else self.share
        reading = self.dataset.source.begin(turn, place, oldest - at)
        expected = None
        if told and told.get("marks") and told["rank"] == self.rank:
            expected = MarkedStretch(**told["marks"])
        trail = StreamTrail(name, lag, expected)
        of = StreamPass(reading, at, promised, name, trail, self.dataset.ends_there)
        of.skip_to(oldest)
        return of

    def state(self, served: int) -> dict[str, Any]:
        told = {"identity": self.dataset.source.identity, "rank": self.rank}
        if not served:
            return told
        if self._serving is None:
            return self._resumed or told
        plan, of = self._serving
        # Where no end has been noticed yet, none changes who stands in the buffer.
        samples = of.samples or ENDLESS
        return told | of.state(_oldest(replace(plan, samples=samples).walk(served)[0]))

    def resume(self, told: dict[str, Any] | None, served: int) -> None:
        identity = self.dataset.source.identity
        if told is None or told["identity"] != identity:
            was = "a loader without a stream" if told is None else told["identity"]
            raise StateError(
                f"the saved loader state is that of {was}, and this loader's stream is {identity}:"
                " make the loader with the stream of that run"
            )
        self._serving = None
        self._resumed = dict(told) if served else None

    def close(self) -> None:
        """Let go of the files of a pass that was left. Its state may still be asked for."""
        if self._serving is not None:
            self._serving[1].close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets no stream that is being read."""
        resumed = None if self._serving else self._resumed
        return self.__dict__ | {"_serving": None, "_resumed": resumed}


def _smaller(plan: ReuseBuffer, samples: int, pass_index: int) -> ReuseBuffer:
    """The plan of a pass that has fewer samples than a batch: then each batch has all of them."""
    if samples and not plan.drop_last:
        return replace(plan, batch_size=samples)
    raise SourceError(
        f"pass {pass_index} of the stream (samples: {samples}) fills no batch of"
        f" {plan.batch_size}: lower batch_size, leave drop_last out, or give another stream"
    )


def _oldest(residents: Residents) -> int:
    return int(min(residents.positions, default=residents.entered))


def _numbered(
    serves: Iterator[tuple[Serve, bool]], first: int, batches: int | None, ending: PassEnding
) -> Iterator[tuple[int, Serve]]:
    """The batches with their numbers. `ending` is told before the last one is given."""
    number = first
    for serve, last in serves:
        number += 1
        if last or number == batches:
            ending.batches = number
        yield number - 1, serve
        if number == ending.batches:
            return
