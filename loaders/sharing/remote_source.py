"""Reads a view of a stream in another process, so that several processes read one loader together.

    stream of this process -> RemoteSource -> RemoteView .... stream of another process
                                          '-> the loader itself, where that one is gone or fails

What another process cannot give is read here, from the same batch on: nobody sees a difference, and
an error of the data set is raised where its reader is.
"""

import logging
from collections.abc import Callable

from loaders.loader import ReuseLoader
from loaders.sharing.batch_source import BatchSource, PassServing, SharedBatch
from loaders.sharing.lockstep import Mark
from loaders.sharing.remote_view import RemoteView

log = logging.getLogger(__name__)


class RemoteSource(BatchSource):
    """One stream's."""

    def __init__(self, loader: ReuseLoader, open_view: Callable[[], RemoteView | None]) -> None:
        """`open_view` is called before the first batch. It returns a view that serves what
        `loader` would serve, or None if there is none."""
        super().__init__(loader)
        self._own = loader
        self._open_view: Callable[[], RemoteView | None] | None = open_view
        self._closed = False

    @property
    def is_remote(self) -> bool:
        """Whether another process reads for this one."""
        return self.loader is not self._own

    def read(self, mark: Mark, wanted: PassServing) -> SharedBatch:
        open_view, self._open_view = self._open_view, None
        view = None if open_view is None else open_view()
        if view is not None:
            self.loader = view
        if not self.is_remote:
            return super().read(mark, wanted)
        try:
            batch = super().read(mark, wanted)
            if batch.error is None:
                return batch
            error = batch.error
        except Exception as raised:
            error = raised
        if self._closed:
            raise error
        log.warning("pass %d is read in this process from batch %d on: %s", *mark, error)
        gone, self.loader = self.loader, self._own
        self.leave()
        gone.close()
        return super().read(mark, wanted)

    def close(self) -> None:
        self._closed = True
        super().close()
        if self.is_remote:
            self._own.close()
