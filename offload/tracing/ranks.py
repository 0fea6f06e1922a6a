"""Gradients of several processes, averaged inside the step as torch's DDP averages them.

    compute   .. b9 share9 b8 share8 b7 .. b2 share2 b1 share1  update9 update8 ..
    ranks     same           [bucket 1: 9 8 7]      [bucket 2 ...]      one after the other

A share is `g / n`, written into a bucket. From then on the gradient is there: the update reads it,
and `g` is dead. All ranks sum their buckets in one order, whatever their plans: the sums are
chained, and their lane has one thread, so no two ranks can wait for each other. The parameters
alone decide which gradient lies in which bucket.

The first task of the chain compares what the ranks are about to sum. Nothing has changed by then.
So if one rank has other gradients, all ranks raise an error instead of hanging.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import distributed

from offload.errors import CaptureError, StepError
from offload.graph.taskgraph import RANKS, Role, TaskGraph
from offload.program.kernels import Call, Value
from offload.tracing.building import Build
from offload.tracing.collectives import together
from offload.tracing.tape import UPDATE

Parameter = torch.nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that train together, each on its own part of a batch."""

    size: int
    parameters: Sequence[Parameter]
    """Roughly in the order of the forward pass; buckets are filled from the last to the first."""
    bucket_bytes: int = 25 << 20
    group: Any = None
    """A process group; None: all processes."""

    def buckets(self, found: Iterable[Parameter]) -> list[list[Parameter]]:
        """Group parameters whose gradients are summed at once: one dtype, at most
        `bucket_bytes`."""
        wanted = {id(p): p for p in found}
        ordered = [wanted.pop(id(p)) for p in reversed(self.parameters) if id(p) in wanted]
        buckets: dict[torch.dtype, list[Parameter]] = {}
        done: list[list[Parameter]] = []
        for p in (*ordered, *wanted.values()):
            bucket = buckets.setdefault(p.dtype, [])
            if bucket and _nbytes(*bucket, p) > self.bucket_bytes:
                done.append(bucket)
                bucket = buckets[p.dtype] = []
            bucket.append(p)
        return [*done, *buckets.values()]

    def average(
        self,
        gradients: Mapping[Parameter, torch.Tensor],
        names: Mapping[Parameter, str] | None = None,
    ) -> None:
        """Average in place, with the same bits as a planned step. `names`: with them all ranks
        raise an error if one has other gradients. They compare when the kernels run."""
        buckets = self.buckets(gradients)
        for number, bucket in enumerate(buckets):
            flat = torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
            views: list[torch.Tensor] = []
            at = 0
            for p in bucket:
                views.append(flat.as_strided(p.size(), p.stride(), at))
                write_share(views[-1], gradients[p], self.size)
                at += p.numel()
            if names is not None and number == 0:
                compare(flat, "\n".join(_said(b, names) for b in buckets))
            AllReduce(self.group)(flat)
            for p, view in zip(bucket, views, strict=True):
                gradients[p].copy_(view)


def check_ranks(device: torch.device) -> None:
    """Raise `CaptureError` if a step on this device cannot average gradients over ranks."""
    if device.type != "cpu":
        raise CaptureError(
            f"gradients on {device} cannot be averaged over several processes inside a step yet."
            " Train on one GPU, or use torch's DDPStrategy without offloading"
        )


def averaged(
    build: Build, ranks: Ranks, gradients: Mapping[Parameter, tuple[Value, Value]]
) -> dict[Parameter, Value]:
    """Add the tasks that average every gradient over all ranks. Returns where the averages lie.

    `gradients`: where each parameter and its gradient lie."""
    buckets = ranks.buckets(gradients)
    found: dict[Parameter, Value] = {}
    contents: list[str] = []
    flats: list[Value] = []
    for number, bucket in enumerate(buckets, 1):
        numel, dtype = sum(p.numel() for p in bucket), bucket[0].dtype
        name = f"gradients {number}/{len(buckets)}"
        flat = build.builder.buffer(name, numel * dtype.itemsize, Role.GRADIENT)
        at = 0
        for p in bucket:
            own, g = gradients[p]
            _check_dense(build.builder.buffers[own.buffer].name, own)
            found[p] = replace(own, buffer=flat, offset=at)
            _share(build, ranks, build.builder.buffers[own.buffer].name, found[p], g, at == 0)
            at += prod(own.size)
        names = {p: build.builder.buffers[gradients[p][0].buffer].name for p in bucket}
        contents.append(_said(bucket, names))
        flats.append(Value(flat, dtype, (numel,), (1,)))
    before = build.task(
        "ranks",
        (),
        (),
        Call(Same(ranks.group, tuple(contents))),
        **_late(0, *build.latest_collective),
    )
    for number, flat in enumerate(flats, 1):
        b = (flat.buffer,)
        nbytes = build.builder.buffers[flat.buffer].nbytes
        before = build.task(
            f"all_reduce {number}/{len(flats)}", b, b, Call(AllReduce(ranks.group), (flat,)),
            **_late(nbytes, before),
        )  # fmt: skip
    return found


def _late(traffic: int = 0, *after: int) -> dict[str, Any]:
    return {"lane": RANKS, "phase": UPDATE, "traffic": traffic, "after": after}


def _share(build: Build, ranks: Ranks, name: str, place: Value, g: Value, first: bool) -> None:
    touched = (g.buffer,) if first else (g.buffer, place.buffer)
    call = Call(write_share, (place, g, ranks.size))
    traffic = 2 * prod(g.size) * g.dtype.itemsize
    build.task(f"{name}.share", touched, (place.buffer,), call, phase=UPDATE, traffic=traffic)


def _check_dense(name: str, own: Value) -> None:
    span = 1 + sum((n - 1) * step for n, step in zip(own.size, own.stride, strict=True))
    if span != prod(own.size):
        raise CaptureError(
            f"{name} has size {own.size} and stride {own.stride}, which leaves holes. Make it"
            " contiguous: nn.Parameter(p.detach().contiguous())"
        )


def _said(bucket: Sequence[Parameter], names: Mapping[Parameter, str]) -> str:
    numel = sum(p.numel() for p in bucket)
    return f"{numel} {bucket[0].dtype} of {', '.join(names[p] for p in bucket)}"


def _nbytes(*parameters: Parameter) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


# ---- kernels ------------------------------------------------------------------------------------


def write_share(place: torch.Tensor, g: torch.Tensor, size: int) -> None:
    """Divide first and sum afterwards, as torch's reducer does."""
    torch.mul(g, 1.0 / size, out=place)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums the tensors of all ranks in place."""

    group: Any

    def __call__(self, tensor: torch.Tensor) -> None:
        with together(self.group):
            distributed.all_reduce(tensor, group=self.group)


@dataclass(frozen=True, slots=True)
class Same:
    """Raises on every rank unless all of them are about to sum the same gradients."""

    group: Any
    contents: tuple[str, ...]
    """A description of each bucket."""

    def __call__(self) -> None:
        digest = sha256("\n".join(self.contents).encode()).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        size = distributed.get_world_size(self.group)
        with together(self.group):
            seen = [torch.empty_like(mine) for _ in range(size)]
            distributed.all_gather(seen, mine, group=self.group)
            if not all(torch.equal(other, mine) for other in seen):
                everybody: list[Any] = [None] * size
                distributed.all_gather_object(everybody, self.contents, group=self.group)
                raise StepError(difference(everybody))


@torch.library.custom_op("offload_ranks::compare", mutates_args=["before"])
def compare(before: torch.Tensor, contents: str) -> None:  # noqa: ARG001
    """Does what `Same` does, as an op that a live step sees: a collective before others. `before`:
    what is summed next, which waits for this."""
    Same(None, tuple(contents.splitlines()))()


def contents_of(graph: TaskGraph) -> tuple[str, ...]:
    """Descriptions of the buckets that a step averages over all ranks."""
    kernels = [task.kernel for task in graph.tasks if task.lane == RANKS]
    return next((k.op.contents for k in kernels if isinstance(k.op, Same)), ())


def difference(everybody: Sequence[tuple[str, ...]]) -> str:
    """How the `contents` of the ranks differ; empty if they agree."""
    rank = next((n for n, contents in enumerate(everybody) if contents != everybody[0]), 0)
    if not rank:
        return ""
    ours, theirs = set(everybody[0]), set(everybody[rank])
    return (
        f"rank {rank} has other gradients in this step than rank 0:"
        f" {'; '.join(sorted(theirs - ours))[:300] or 'fewer of them'}, against"
        f" {'; '.join(sorted(ours - theirs))[:300] or 'fewer of them'}. All ranks must train the"
        " same parameters in the same step"
    )
