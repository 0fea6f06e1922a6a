"""Plans and drivers of engine `cuda`, a stream that comes late, a kernel that fails."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs
from support.graph_edits import with_task

import offload
from offload.running.drivers.cuda import Cuda
from offload.running.runner import Runner
from offload.torch_seams import spin

CUDA = torch.device("cuda")
HELD = ("", "compute", "h2d", "d2h")
SHAPES: tuple[dict[str, Any], ...] = (
    {"thin": 4096}, {"wide": 1 << 16, "thin": 64}, {"host_updates": True},
)  # fmt: skip
"""Of chains."""
CYCLES = 200_000
"""0.1 ms of a device."""
Bytes = Sequence[torch.Tensor]


def driver(held: str = "", kind: type[Cuda] = Cuda) -> Any:
    """A driver of which one stream is late: it idles before each of its nodes, in a graph too."""
    made = kind(CUDA)
    enqueue = made.enqueue

    def enqueue_late(stream: torch.cuda.Stream, run: Callable[[], object]) -> None:
        if stream is made._streams.get(held):
            enqueue(stream, partial(spin, CYCLES))
        enqueue(stream, run)

    if held:
        made.enqueue = enqueue_late  # type: ignore[method-assign]
    return made


def planned(graph: Any, budget: Any = None, **more: Any) -> Any:
    made = offload.plan(graph, budget, placement="copy", recompute=False, **more)
    made.verify()
    return made


def smallest(graph: Any) -> int:
    """What is needed at least, with what a device's libraries keep."""
    with pytest.raises(offload.BudgetTooSmall) as refused:
        planned(graph, 1)
    return refused.value.needed


def same(runner: Runner, plainly: Any, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> bool:
    [expected] = plainly.step(x)
    [found] = runner(x.to(next(iter(tensors.values())).device))
    right = torch.equal(found.cpu(), expected)
    return right and all(torch.equal(tensors[k].cpu(), plainly.held[k]) for k in tensors)


def works(runner: Runner, graph: Any, tensors: dict[str, torch.Tensor], seed: int = 7) -> bool:
    """The next step is right, from the values that the tensors have now."""
    plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
    return same(runner, plainly, tensors, graphs.batch(graph.buffers[0].nbytes, seed))


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("perfect-offload")]


class Fault:
    """A kernel that can fail, by another kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.error: BaseException | None = None
        self.before: Any = lambda: None

    def __call__(self, reads: Bytes, writes: Bytes) -> None:
        self.before()
        if self.error is not None:
            raise self.error
        self.kernel(reads, writes)


def faulty(task: str, **shape: Any) -> Any:
    graph = graphs.chain(**shape)
    [found] = [t for t in graph.tasks if t.name == task]
    fault = Fault(found.kernel)
    graph = with_task(graph, task, kernel=fault)
    return graph, fault
