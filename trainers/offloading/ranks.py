"""Gradients of several processes, averaged as torch's DDP averages them, by ops of the live step.

    g -> g / n -> flat     a bucket, from the last parameters to the first
    compare(flat)          once a step, on all ranks: an error on each if one has other gradients
    all_reduce(flat)       one bucket after the other
    flat -> g

The parameters alone decide which gradient lies in which bucket.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import distributed

from offload import StepError
from offload.live.collectives import together

Parameter = torch.nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that train together, each on its own part of a batch."""

    size: int
    parameters: Sequence[Parameter]
    """Roughly in the order of the forward pass; buckets are filled from the last to the first."""
    bucket_bytes: int

    def average(
        self, gradients: Mapping[Parameter, torch.Tensor], names: Mapping[Parameter, str]
    ) -> None:
        """Average in place. All ranks raise an error if one has other gradients: they compare when
        the kernels run."""
        buckets = self._buckets(gradients)
        for number, bucket in enumerate(buckets):
            flat = torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
            views: list[torch.Tensor] = []
            at = 0
            for p in bucket:
                views.append(flat.as_strided(p.size(), p.stride(), at))
                # As torch's reducer does, divide first and sum afterwards.
                torch.mul(gradients[p], 1.0 / self.size, out=views[-1])
                at += p.numel()
            if number == 0:
                compare(flat, "\n".join(_said(b, names) for b in buckets))
            with together(None):
                distributed.all_reduce(flat)
            for p, view in zip(bucket, views, strict=True):
                gradients[p].copy_(view)

    def _buckets(self, found: Iterable[Parameter]) -> list[list[Parameter]]:
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


@torch.library.custom_op("offload_ranks::compare", mutates_args=["before"])
def compare(before: torch.Tensor, contents: str) -> None:  # noqa: ARG001
    """Raise on every rank unless all of them are about to sum the same gradients. `before`: what is
    summed next, which waits for this. `contents`: a line for each bucket."""
    mine = torch.frombuffer(bytearray(sha256(contents.encode()).digest()), dtype=torch.uint8)
    size = distributed.get_world_size()
    with together(None):
        seen = [torch.empty_like(mine) for _ in range(size)]
        distributed.all_gather(seen, mine)
        if not all(torch.equal(other, mine) for other in seen):
            everybody: list[Any] = [None] * size
            distributed.all_gather_object(everybody, contents.splitlines())
            raise StepError(difference(everybody))


def difference(everybody: Sequence[Sequence[str]]) -> str:
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


def _said(bucket: Sequence[Parameter], names: Mapping[Parameter, str]) -> str:
    numel = sum(p.numel() for p in bucket)
    return f"{numel} {bucket[0].dtype} of {', '.join(names[p] for p in bucket)}"


def _nbytes(*parameters: Parameter) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
