"""torch.cuda's capture and replay: streams that fork by events and join become one CUDAGraph.

    begin_capture    the origin becomes current, torch's CUDAGraph begins on it
    enqueue ...      kernels and asynchronous copies are recorded; torch.cuda.Event gives edges
    end_capture      instantiated; its `replay` is one launch

What kernels allocate outside of the plan comes from one pool for all graphs of a driver: they are
replayed on one stream, and nothing that lies there outlives a replay. (torch gives a pool up with
the last graph that uses it: then there is a new one.) The device's default
generator takes part by itself: at a replay it gives the graph its seed and offset of then, and
goes on as far as the graph draws. cuBLAS and cuDNN have their handles and workspaces for these
streams from a step that ran on them before.

Only calls of this thread break a capture ("thread_local"): loaders may pin and copy meanwhile.
"""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from offload.drivers import Run
from offload.drivers.cuda import Cuda, CudaStream

MODE = "thread_local"


class GraphCuda(Cuda):
    """One device's streams, and what is captured from them."""

    _pool: Any = None
    """Of all graphs of this driver that are still there."""
    _graph: torch.cuda.CUDAGraph | None = None
    _origin: CudaStream | None = None
    _collects = False
    _broken: tuple[torch.cuda.CUDAGraph, ...] = ()

    def __init__(self, device: torch.device, spin: Mapping[str, int] | None = None) -> None:
        super().__init__(device, spin)
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def begin_capture(self, origin: CudaStream) -> None:
        self.synchronize()
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._switch(origin)
        # A collection in the middle might free what CUDA does not let go of in a capture.
        self._collects = gc.isenabled()
        self._graph, self._origin = graph, origin  # first: after a Ctrl-C it is dropped
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode=MODE)

    def end_capture(self) -> Run:
        graph = self._graph
        if graph is None:
            raise RuntimeError("no capture is going on")
        try:
            self._end(graph)
        except BaseException:
            self._bury(graph)
            raise
        self._captured.add(graph)
        return graph.replay

    def drop_capture(self) -> None:
        graph = self._graph
        if graph is None:
            return
        try:
            self._end(graph)
        except RuntimeError as error:
            del error  # that it is broken, which is why it is dropped
            self._bury(graph)
        else:
            graph.reset()

    def _bury(self, graph: torch.cuda.CUDAGraph) -> None:
        """torch leaves things half done where a capture fails. Its allocator may still ask the
        graph which stream is captured, so it stays; and the generator may believe that it is in a
        capture: it goes on with a copy of its state, which does not."""
        self._broken = (*self._broken, graph)
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """On the stream that it began on."""
        try:
            if self._origin is not None:
                self._switch(self._origin)
            graph.capture_end()
        finally:
            if self._collects:
                gc.enable()
            self._graph = None  # last: after a Ctrl-C before, `drop_capture` does it once more

    def _switch(self, stream: CudaStream) -> None:
        torch.cuda.set_stream(stream)
        self._current = stream
