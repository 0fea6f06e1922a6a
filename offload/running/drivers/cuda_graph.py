"""Capture and replay by torch.cuda: streams that fork by events and join become one CUDAGraph.

    begin_capture(compute)   enqueue record wait enqueue ...   replay = end_capture()
    compute  [fork F1 F2 ............ join]                    enqueue(compute, replay), every step
    h2d        `-> W2 W3 -----------'                          one launch, without Python

Nothing runs while it is captured. A stream takes part once it waits for an event of one that does,
and joins through an event for which the first stream waits. Whatever would need the host in between
is refused: asking captured events, `synchronize`, `begin`, `end`, a value for Python.

A capture that met an error is broken. Only `end_capture` or `drop_capture` may follow, and after
them the streams are as before. Do not replay earlier captures after that: they may no longer know
the random generator.

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
from typing import Any

import torch

from offload.errors import OffloadError
from offload.running.drivers.cuda import Cuda, Run

MODE = "thread_local"


class GraphCuda(Cuda):
    """The streams of one device, and the graphs captured from them, one at a time."""

    _pool: Any = None
    """The memory pool of all graphs of this driver that still exist."""
    _graph: torch.cuda.CUDAGraph | None = None
    _origin: torch.cuda.Stream | None = None
    _collects = False
    _broken: tuple[torch.cuda.CUDAGraph, ...] = ()

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def drive(self, count: int) -> None:
        if count > 1:
            raise OffloadError(
                f"engine 'cudagraph' runs steps of one device, and this one is for {count}: a graph"
                " has memory and random draws of one device alone. Use engine 'cuda'"
            )

    def begin_capture(self, origin: torch.cuda.Stream) -> None:
        """Start to capture on this stream and on those that fork from it. All streams are idle."""
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
        """End the capture. Returns a function that runs it, to be enqueued on the origin; it keeps
        what it needs alive. Raises if the capture is broken or a stream has not joined; it has
        ended then, too."""
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
        """End the capture and keep nothing. Does nothing if there is none."""
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

    def _switch(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        self._current = stream
