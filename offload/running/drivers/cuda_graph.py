"""Capture and replay by torch.cuda: streams that fork by events and join become one CUDAGraph.

    begin_capture    the origin becomes the current stream, and torch's CUDAGraph begins on it
    enqueue ...      kernels and asynchronous copies are recorded; torch.cuda.Event gives edges
    end_capture      the graph is instantiated; its `replay` is one launch

What kernels allocate outside of the plan comes from one pool for all graphs of a driver. They are
replayed on one stream, and nothing in the pool outlives a replay. (torch frees a pool with the last
graph that uses it; then there is a new one.) The device's default generator takes part by itself:
at a replay it gives the graph its present seed and offset, and moves on by what the graph draws.
cuBLAS and cuDNN have handles and workspaces for these streams from an earlier step that ran on
them.

Only calls of this thread break a capture ("thread_local"), so loaders may pin and copy meanwhile.
"""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from offload.running.drivers.cuda import Cuda, CudaStream
from offload.running.drivers.driver import Run

MODE = "thread_local"


class GraphCuda(Cuda):
    """The streams of one device, and the graphs captured from them."""

    _pool: Any = None
    """The memory pool of all graphs of this driver that still exist."""
    _graph: torch.cuda.CUDAGraph | None = None
    _origin: CudaStream | None = None
    _collects = False
    _broken: tuple[torch.cuda.CUDAGraph, ...] = ()

    def __init__(self, device: torch.device, spin: Mapping[str, int] | None = None) -> None:
        super().__init__(device, spin)
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def begin_capture(self, origin: CudaStream) -> None:
        self.synchronize()  # as torch.cuda.graph does; a capture is rare, and drivers differ
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._switch(origin)
        # A garbage collection now might free memory that CUDA must not free during a capture.
        self._collects = gc.isenabled()
        self._graph, self._origin = graph, origin  # first: after a Ctrl-C it is dropped
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode=MODE)

    def end_capture(self) -> Run:
        graph = self._graph
        if graph is None:
            raise RuntimeError("no capture is going on; call begin_capture first")
        try:
            self._end(graph)
        except BaseException:
            self._keep_broken(graph)
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
            del error  # it says that the capture is broken, and that is why it is dropped
            self._keep_broken(graph)
        else:
            graph.reset()

    def _keep_broken(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a failed capture, where torch leaves things half done.

        Its allocator may still ask the graph which stream is captured, so the graph is kept. And
        the generator may believe that it is in a capture, so it goes on with a copy of its state,
        which does not."""
        self._broken = (*self._broken, graph)
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture on the stream on which it began."""
        try:
            if self._origin is not None:
                self._switch(self._origin)
            graph.capture_end()
        finally:
            if self._collects:
                gc.enable()
            # Last, so that after a Ctrl-C before this line `drop_capture` does it again.
            self._graph = None

    def _switch(self, stream: CudaStream) -> None:
        torch.cuda.set_stream(stream)
        self._current = stream
