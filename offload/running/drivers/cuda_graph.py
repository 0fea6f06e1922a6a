"""Capture and replay by torch.cuda: streams that fork by events and join become one CUDAGraph.

    begin_capture(compute)   enqueue record wait enqueue ...   replay = end_capture()
    compute  [fork F1 F2 ............ join]                    enqueue(compute, replay), every step
    h2d        `-> W2 W3 -----------'                          one launch, without Python

Nothing runs while it is captured. A stream takes part once it waits for an event of one that does,
and joins through an event for which the first stream waits. Whatever would need the host in between
is refused: asking captured events, `synchronize`, `begin`, `end`, a value for Python.

The streams may be of several devices: to CUDA a graph is of none. torch gives it the memory pool of
the first device, and we those of the others.

A capture that met an error is broken. Only `end_capture` or `drop_capture` may follow, and after
them the streams are as before. Do not replay earlier captures after that: they may no longer know
the random generator.

What kernels allocate outside of the plan comes from one pool a device for all graphs of a driver.
They are replayed on one stream, and nothing in the pool outlives a replay. (torch frees a pool with
the last graph that uses it; then there are new ones.) The default generator takes part by itself
where there is one device: at a replay it gives the graph its present seed and offset, and moves on
by what the graph draws. It would give them to several devices on streams that the graph does not
wait for, so a step that draws on several is not captured (binding.py).
cuBLAS and cuDNN have handles and workspaces for these streams from an earlier step that ran on
them.

Only calls of this thread break a capture ("thread_local"), so loaders may pin and copy meanwhile.
"""

import gc
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from offload.running.drivers.cuda import Cuda, Run

MODE = "thread_local"


class GraphCuda(Cuda):
    """The streams of devices, and the graphs captured from them, one at a time."""

    _pool: Any = None
    """The first device's memory pool of all graphs of this driver that still exist."""
    _other_pools: tuple[torch.cuda.MemPool, ...] = ()
    """Those of the other devices."""
    _graph: torch.cuda.CUDAGraph | None = None
    _origin: torch.cuda.Stream | None = None
    _collects = False
    _broken: tuple[torch.cuda.CUDAGraph, ...] = ()

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._allocating = ExitStack()
        """Has this thread allocate from the other devices' pools during a capture."""

    def begin_capture(self, origin: torch.cuda.Stream) -> None:
        """Start to capture on this stream and on those that fork from it. All streams are idle."""
        self.synchronize()  # as torch.cuda.graph does; a capture is rare, and drivers differ
        if not self._captured:
            self._pool, self._other_pools = torch.cuda.graph_pool_handle(), ()
        without = self.devices[1 + len(self._other_pools) :]
        self._other_pools += tuple(map(_make_pool, without))
        graph = torch.cuda.CUDAGraph()
        self._switch(origin)
        # A garbage collection now might free memory that CUDA must not free during a capture.
        self._collects = gc.isenabled()
        self._graph, self._origin = graph, origin  # first: after a Ctrl-C it is dropped
        gc.disable()
        for device, pool in zip(self.devices[1:], self._other_pools, strict=True):
            self._allocating.enter_context(torch.cuda.use_mem_pool(pool, device))
        graph.capture_begin(pool=self._pool, capture_error_mode=MODE)
        fork = self.event()
        fork.record(origin)
        for landing in self._idle.values():
            landing.wait_event(fork)

    def end_capture(self) -> Run:
        """End the capture. Returns a function that runs it, to be enqueued on the origin; it keeps
        what it needs alive. Raises if the capture is broken or a stream has not joined; it has
        ended then, too."""
        graph = self._graph
        if graph is None:
            raise RuntimeError("no capture is going on; call begin_capture first")
        try:
            for landing in self._idle.values():
                joined = self.event()
                joined.record(landing)
                joined.wait(self._origin)
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
            self._allocating.close()
            if self._collects:
                gc.enable()
            # Last, so that after a Ctrl-C before this line `drop_capture` does it again.
            self._graph = None

    def _switch(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        self._current = stream


def _make_pool(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()
