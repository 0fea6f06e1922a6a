"""The pipeline of one loader in this process: made when it is first asked for, closed when the
loader is, or when nobody holds the loader any more. While one pass drains, it follows the next."""

import os
import weakref
from typing import Any

from loaders.pipeline import Pipeline, PipelineSetup
from loaders.workers.pass_order import PassOrder
from loaders.workers.precedence import Precedence


class ProcessPipeline:
    """A pipeline, and what is to be remembered when it is gone."""

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
        return self._skipped | (self.open.reader.skipped if self.open else {})

    @property
    def bytes_taken(self) -> dict[str, int]:
        return self.open.bytes_taken if self.open else {}

    def follow(self, order: PassOrder, reuse: int) -> None:
        assert self.open is not None, "a pass is served"
        self.following = order
        self.open.follow(order, reuse)

    def followed(self, pass_index: int, slots: int) -> tuple[PassOrder | None, int]:
        """The order that the workers follow, if it fits this pass; else how many samples they
        decoded in vain."""
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
