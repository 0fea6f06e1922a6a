"""What runs the passes of one loader in this process: its pipeline, or a DataLoader of torch's.

The pipeline is made when it is first needed. It is closed when the loader is, or when nobody holds
the loader any more. While one pass drains, it follows the next.
"""

import copy
import os
import weakref
from typing import Any

from loaders.arguments import PassPosition
from loaders.batching.device import DeviceFeed
from loaders.passes.own_batches import OwnOrder, OwnPass
from loaders.passes.pass_run import PassRun
from loaders.passes.rank_order import RankOrder
from loaders.passes.stream_order import StreamOrder
from loaders.passes.torch_pass import TorchBatches, TorchPass
from loaders.pipeline import AHEAD, Pipeline, PipelineSetup
from loaders.workers.decode_work import PassOrder
from loaders.workers.precedence import Precedence


class ProcessPipeline:
    """A pipeline, and what is remembered when it is closed."""

    def __init__(self) -> None:
        self.open: Pipeline | None = None
        self._closer: weakref.finalize[..., ProcessPipeline] | None = None
        self._skipped: dict[int, str] = {}
        self.following: PassOrder | None = None
        """The order of the next pass, of which the workers decode the first samples already."""

    def get(self, setup: PipelineSetup, rank: int, precedence: Precedence) -> Pipeline:
        # A forked process has no threads of its parent, and must not touch its memory.
        if self.open is None or self.open.pid != os.getpid():
            self.open = Pipeline(setup, rank, precedence)
            self._closer = weakref.finalize(self, self.open.close)
        return self.open

    @property
    def skipped(self) -> dict[int, str]:
        return self._skipped | (self.open.reader.skipped.reasons if self.open else {})

    @property
    def bytes_taken(self) -> dict[str, int]:
        return self.open.bytes_taken if self.open else {}

    def follow(self, order: PassOrder, reuse: int) -> None:
        assert self.open is not None, "a pass is served"
        self.following = order
        self.open.follow(order, reuse)

    def followed(self, pass_index: int, slots: int) -> tuple[PassOrder | None, int]:
        """The order that the workers follow, if it fits this pass; else the decodes in vain."""
        order = self.following
        if order is None or self.open is None:
            return None, 0
        if not self.open.suits(slots) or order.pass_index != pass_index:
            return None, self.stop()
        self.following = None
        return order, 0

    def stop(self) -> int:
        """Stop the workers. Returns how many samples of the next pass they decoded in vain."""
        following, self.following = self.following, None
        if self.open is not None and not self.open.stop():
            self.close()
        return 0 if following is None else following.progress.decoded

    def close(self) -> None:
        self._skipped = self.skipped
        if self._closer is not None:
            self._closer()
        self.open = self._closer = None

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets no threads and no memory."""
        return {"open": None, "_closer": None, "_skipped": dict(self._skipped), "following": None}


class PassRunner:
    """The pass that one loader serves, and what serves it."""

    def __init__(self, feed: DeviceFeed | None) -> None:
        self.pipeline = ProcessPipeline()
        self.torch = TorchBatches()
        self.feed = feed
        self.made_ahead = AHEAD
        """So many batches are made before the consumer asks for them."""
        self.run: PassRun | TorchPass | OwnPass | None = None

    def follow_next_pass(self, order: RankOrder | StreamOrder | OwnOrder, at: PassPosition) -> None:
        """Let the workers go on with the next pass when this one's samples are all taken."""
        run, pipeline = self.run, self.pipeline
        free = pipeline.following is None and run is not None and run.leaves_room
        known = order.foreseen and at.next.batch_size == at.running.batch_size
        in_memory = pipeline.open is None or pipeline.open.setup.opened.decoded is not None
        if free and known and not in_memory:
            pipeline.follow(order.of_pass(at.pass_index + 1), at.running.reuse)

    def leave(self) -> int:
        """Stop a pass that was not served to its end. Returns its extra decodes."""
        run, self.run = self.run, None
        return 0 if run is None else self.pipeline.stop() + run.extra_decodes()

    def finish(self) -> int:
        """End a pass whose last batch was taken. Returns its extra decodes."""
        run, self.run = self.run, None
        assert run is not None, "a pass is served"
        run.finish()
        return run.extra_decodes()

    def close(self) -> int:
        """End the workers and free memory. Returns the extra decodes."""
        extra = self.leave() + self.pipeline.stop()
        self.pipeline.close()
        self.torch.close()
        return extra

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets no threads and no memory."""
        copies = {"pipeline": copy.copy(self.pipeline), "torch": copy.copy(self.torch)}
        return self.__dict__ | copies | {"run": None}
