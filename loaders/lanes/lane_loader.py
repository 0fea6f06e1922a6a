"""`LaneLoader`: any lanes of one loader's data, served by whoever is there.

    lanes = LaneLoader(loader, lanes=64)      the same on every peer
    lanes.hold(mine)                          their samples are decoded ahead
    for lane in mine: lanes.take(lane)        the micro-batches of this step, in any order
    lanes.advance()                           the step is committed

What a lane serves at a step is a function of (seed, pass, lane, number of lanes) alone.
"""

import copy
import os
import weakref
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any

import torch

from loaders.arguments import SAME_AFTER_RESUME, UNCOMPARED_SEED, Serving, check_order
from loaders.batching.batches import Batch, Gathered
from loaders.closing import ClosedAtEnd
from loaders.errors import LaneError, StateError
from loaders.lanes.held_lanes import LaneProgress
from loaders.lanes.lane_crew import LaneCrew
from loaders.lanes.lane_order import LanePass, LaneServe
from loaders.loader import ReuseLoader
from loaders.order.reuse import ORDER_STREAM, ORDER_VERSION
from loaders.stats import BatchInfo, BufferSize, LoaderStats
from loaders.workers.decode_work import PassOrder


@dataclass(frozen=True, slots=True, eq=False)
class LaneBatch:
    """The micro-batch of one lane at one step."""

    batch: Batch
    """As the loader collates it. It stays the consumer's as long as the consumer keeps it."""
    info: BatchInfo


@dataclass(slots=True)
class LanePlace:
    """The step that is served now."""

    pass_index: int
    step: int = 0
    running: Serving | None = None
    """How its pass is served. None: as the loader says, for it has not begun."""


class LaneLoader(ClosedAtEnd):
    """Serves any set of lanes of one `ReuseLoader`'s data. One thread uses it."""

    def __init__(self, loader: ReuseLoader, lanes: int) -> None:
        """The `batch_size` of `loader` is that of one lane at one step."""
        check_loader(loader)
        check_place(loader)
        loader.use_drawn_seed(UNCOMPARED_SEED)
        if loader.position.resuming:
            raise LaneError(
                f"the loader is to go on after batch {loader.position.served} of a pass of its own,"
                " which is no step of its lanes: load the state of a LaneLoader"
            )
        self.loader = loader
        self.lanes = index(lanes)
        self._place = LanePlace(loader.position.pass_index + (loader.position.served > 0))
        self._order: PassOrder | None = None
        self._following: PassOrder | None = None
        self._ended = False
        """Whether the pass before this one was served to its end, and this one has not begun."""
        self._identity = copy.copy(loader.identity)
        self._stats = LoaderStats()
        self._counted_pass = -1
        self._crew: LaneCrew | None = None
        self._closed = False
        check_pass(self._pass)

    @property
    def position(self) -> tuple[int, int]:
        """The pass and its step that are served now."""
        return self._place.pass_index, self._place.step

    def __len__(self) -> int:
        """The number of steps of the present pass."""
        return len(self._pass)

    def sizes(self, step: int) -> tuple[int, ...]:
        """The number of samples of every lane at a step of the present pass. At the last steps some
        may be smaller, or 0."""
        if not 0 <= step < len(self):
            raise ValueError(
                f"pass {self._place.pass_index} has no step {step}: it has steps 0 to"
                f" {len(self) - 1}"
            )
        return self._pass.sizes(step)

    def ids(self, lane: int) -> LaneServe:
        """Which samples a lane serves at the present step. Nothing is decoded for it. Only
        `take` shows which sample replaces an unreadable one (on_error="skip")."""
        crew, order = self._begin()
        serve = crew.serve(self._check_lane(lane))
        share = order.drawn_ids[lane :: self.lanes]
        return LaneServe(share[serve.positions], serve.serves)

    def hold(self, lanes: Collection[int]) -> None:
        """Say which lanes this peer expects to be asked for, in this order: they are decoded ahead,
        as far as they are not yet. Lanes that are let go free their memory."""
        wanted = list(dict.fromkeys(self._check_lane(lane) for lane in lanes))
        if self._ended and self._crew is not None:
            # How the next pass is served may still change. What is decoded of it stays.
            self._check_open()
            self._crew.hold(wanted)
        elif wanted or self._crew is not None:
            self._begin()[0].hold(wanted)

    def take(self, lane: int) -> LaneBatch:
        """The micro-batch of a lane at the present step. A lane that is not held is held from now
        on. It may be taken again until the step is committed, and has the same bits then."""
        lane = self._check_lane(lane)
        crew, _ = self._begin()
        pass_index, step = self.position
        if not self._pass.size(lane, step):
            raise LaneError(
                f"lane {lane} has no samples at step {step} of pass {pass_index}: leave out lanes"
                " whose size (sizes(step)) is 0"
            )
        if lane not in crew.table.held:
            crew.hold([*crew.table.held, lane])
        # A peer that evaluates in inference mode must not make tensors for one that trains.
        with torch.inference_mode(False):
            held, gathered = crew.take(lane)
            assert held.room is not None
            batch = held.room.maker.finish(gathered)
        self._count(held.now, gathered)
        self._look_ahead(crew)
        return LaneBatch(batch, gathered.info)

    def advance(self) -> None:
        """Go on to the next step, because this one is committed; after a pass, to the next pass.
        That one is served as the loader says when it is first asked for a batch (`set_reuse`)."""
        self._check_open()
        place, begun = self._place, self._order is not None
        place.running, place.step = self._serving, place.step + 1
        if self._crew is not None and begun:
            self._crew.tell(self._crew.table.advance, place.step)
        if place.step < len(self):
            return
        self._place, self._order = LanePlace(place.pass_index + 1), None
        if not begun:
            self._following = None  # it was the order of the pass that nobody took anything of
        self._ended = self._ended or begun
        self._identity.expect(None)

    @property
    def stats(self) -> LoaderStats:
        """What this peer has decoded and served. A batch counts once, however often it is taken."""
        crew = self._crew
        if crew is None:
            return self._stats
        return replace(
            self._stats,
            extra_decodes=crew.table.extra_decodes,
            stall_seconds=crew.crew.stall_seconds,
            decode_seconds=crew.pace.seconds,
            skipped=len(self.loader.skipped),
            **(crew.pipeline.bytes_taken | {"buffer_bytes": crew.room_bytes}),
        )

    def _count(self, progress: LaneProgress, gathered: Gathered) -> None:
        """Count a batch that was taken, once a step."""
        info = gathered.info
        cached = progress.count_fresh(info.batch_index, info.positions[info.serves == 0])
        if cached is None:
            return
        begins, self._counted_pass = info.pass_index != self._counted_pass, info.pass_index
        ages = progress.walk.ages(info.batch_index)
        self._stats = self._stats.with_batch(info, cached, gathered.seconds, ages, begins)

    def state_dict(self) -> dict[str, Any]:
        """The place, and how passes are served. It is the same on every peer, whatever it holds."""
        loader = self.loader
        return {
            "samples": self._pass.whole.samples,
            "lanes": self.lanes,
            "order_version": ORDER_VERSION,
            **{name: getattr(loader, name) for name in SAME_AFTER_RESUME},
            "pass": self._place.pass_index,
            "step": self._place.step,
            "running": asdict(self._serving),
            "next": asdict(loader.position.next),
            "identity": self._identity.state(in_a_pass=self._place.step > 0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the place of `state`, on any number of peers. All lanes are let go."""
        self._check_open()
        here = self.state_dict()
        if "lanes" not in state:
            raise StateError("this is no state of a LaneLoader: load one that a LaneLoader saved")
        check_order(state, here, ("samples", "lanes", *SAME_AFTER_RESUME), state["step"])
        self._identity.check(state["identity"])
        running, following = Serving(**state["running"]), Serving(**state["next"])
        self._order = self._following = None
        self._ended = False
        if self._crew is not None and self._crew.pid == os.getpid():
            self._crew.hold(())
        for serving in (running, following):  # each is checked as if the user had asked for it
            self.loader.set_reuse(
                serving.reuse, reaugment=serving.reaugment, batch_size=serving.batch_size
            )
            self.loader.limit_pass(serving.pass_limit)
        in_a_pass = state["step"] > 0
        self._place = LanePlace(state["pass"], state["step"], running if in_a_pass else None)
        self._identity.expect(state["identity"] if in_a_pass else None)

    def close(self) -> None:
        """End the threads, and close the loader. It is safe to call this again."""
        self._closed = True
        if self._crew is not None:
            self._crew.close()
        self.loader.close()

    @property
    def _serving(self) -> Serving:
        return self._place.running or self.loader.position.next

    @property
    def _pass(self) -> LanePass:
        return self._pass_of(self._place.pass_index, self._serving)

    def _pass_of(self, pass_index: int, serving: Serving) -> LanePass:
        loader = self.loader
        seed = (loader.seed, ORDER_STREAM, pass_index, 0)
        samples, batches = loader.order.samples, loader.buffer_batches
        whole = serving.plan(loader.options.order, samples, batches, seed)
        return LanePass(whole, self.lanes, serving.reaugment, serving.pass_limit)

    def _begin(self) -> tuple[LaneCrew, PassOrder]:
        """The threads, at the present step of a pass that has begun."""
        self._check_open()
        check_alone(self.loader)
        crew = self._crew_of_this_process()
        place, order = self._place, self._order
        if order is None:
            check_place(self.loader)
            serving = self._serving
            of = self._pass_of(place.pass_index, serving)
            check_pass(of)
            if self.loader.refresh():
                raise LaneError(
                    "the data set has changed since the lanes were made, and other peers do not"
                    " know of it: make another LaneLoader"
                )
            order = self._following or self.loader.order.of_pass(place.pass_index)
            self._identity.begin(order.drawn)
            each = BufferSize(of.slots // serving.batch_size, None)  # of a lane
            self.loader.announcement.announce(self.loader.setup, self.loader.order, serving, each)
            crew.pipeline.prepare(serving, self.loader.buffer_batches)
            if crew.pipeline.cache is not None:
                crew.pipeline.cache.refresh()  # other peers may have written meanwhile
            self._order, self._following, place.running = order, None, serving
            self._ended = False
            crew.tell(crew.table.begin, of, order, place.step)
        return crew, order

    def _crew_of_this_process(self) -> LaneCrew:
        crew, pipeline = self._crew, self.loader.pipeline_of_this_process()
        if crew is None or crew.pid != os.getpid():
            loader = self.loader
            self._order = self._following = None
            crew = self._crew = LaneCrew(
                pipeline, max(loader.workers, 1), loader.runner.made_ahead, loader.precedence
            )
            weakref.finalize(self, crew.close)
        elif pipeline is not crew.pipeline:
            raise LaneError("the loader of these lanes was closed: make another LaneLoader")
        return crew

    def _look_ahead(self, crew: LaneCrew) -> None:
        """Have the samples of the next pass decoded where those of this one are all taken."""
        loader, running = self.loader, self._serving
        if (
            self._following is None
            and loader.setup.opened.decoded is None
            and loader.order.sampler is None
            and running.pass_limit is None
            and loader.batch_size == running.batch_size
            and crew.drains
        ):
            following = self._place.pass_index + 1
            self._following = loader.order.of_pass(following)
            of = self._pass_of(following, running)
            crew.tell(crew.table.follow, of, self._following)

    def _check_lane(self, lane: int) -> int:
        lane = index(lane)
        if not 0 <= lane < self.lanes:
            raise ValueError(f"there is no lane {lane}: there are lanes 0 to {self.lanes - 1}")
        return lane

    def _check_open(self) -> None:
        if self._closed:
            raise LaneError("this LaneLoader was closed: make another one")


def check_loader(loader: Any) -> None:
    """Refuse a loader whose lanes would not be the same on every peer, or not known in advance."""
    if not isinstance(loader, ReuseLoader):
        raise TypeError(
            f"LaneLoader deals out a ReuseLoader, not {type(loader).__name__}:"
            " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
        )
    state, device = loader.state_dict(), loader.options.device
    refused = {
        "the loader reads a stream, whose samples cannot be dealt to lanes, because they cannot be"
        " read by their numbers: give a data set with len() and [i]": state["stream"] is not None,
        'reuse="auto" measures how fast one peer is, but all peers serve the same lanes: give a'
        " number": state["tuner"] is not None,
        f"buffer_bytes={loader.buffer_bytes} decides the order of a lane, but how many lanes a peer"
        " holds changes: leave it out, and give buffer_batches, which counts for each":
            loader.buffer_bytes is not None,
        f"the loader sends its batches to {device and device.to}, but whoever takes the batch of a"
        " lane moves it: leave device out": device is not None,
        'decode="scaled" has no effect on lanes, whose slots hold whole pictures':
            loader.setup.opened.scaled,
        f"the sampler {type(loader.order.sampler).__name__} draws the share of one rank, but lanes"
        " share out the order of all: give a sampler that names no rank":
            loader.order.named is not None,
    }  # fmt: skip
    for why, holds in refused.items():
        if holds:
            raise LaneError(why)


def check_place(loader: ReuseLoader) -> None:
    """Refuse a loader that serves one rank of several by now, or that somebody iterates."""
    if (loader.rank, loader.world_size) != (0, 1):
        raise LaneError(
            f"the loader is that of rank {loader.rank} of {loader.world_size}, but lanes share out"
            " the samples of all: make it with rank=(0, 1)"
        )
    check_alone(loader)


def check_alone(loader: ReuseLoader) -> None:
    if loader.runner.run is not None:
        raise LaneError(
            "a pass of the loader is under way in another iterator: end or close that iterator"
            " before its lanes are served"
        )


def check_pass(of: LanePass) -> None:
    """Refuse a pass in which some lane cannot fill a batch."""
    if of.lanes < 1:
        raise ValueError(f"lanes must be at least 1, not {of.lanes}")
    samples, batch_size = of.whole.samples, of.whole.batch_size
    if of.lanes > samples:
        raise ValueError(
            f"{of.lanes} lanes are more than the data set has samples ({samples}): lower lanes"
        )
    least = of.share(of.lanes - 1)
    if batch_size > least:
        raise ValueError(
            f"batch_size {batch_size} is larger than a lane's share of the data set ({least} of"
            f" {samples} samples on {of.lanes} lanes): lower batch_size or lanes"
        )
