"""Gradients of several processes, averaged as torch's DDP averages them, by ops of the live step.

    backward ... g3 g2 g1 | averages of what has changed | hooks of the user, clipping, update

    g -> g / n -> flat     a bucket, from the last parameters to the first
    compare(flat)          once a step, on all ranks: an error on each if one has other gradients
    all_reduce(flat)       one bucket after the other
    flat -> g

The parameters alone decide which gradient lies in which bucket.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import distributed

from offload import StepError
from offload.live.collectives import naming_lost_ranks
from offload.torch_seams import at_end_of_backward

Parameter = torch.nn.Parameter


def gather_objects(mine: Any) -> list[Any]:
    """Return `mine` of every rank, in the order of the ranks."""
    objects: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(objects, mine)
    return objects


class GradientAverages:
    """Averages the gradients of a module at the end of each backward pass of a fit."""

    def __init__(self, module: torch.nn.Module, bucket_bytes: int, *, searches: bool) -> None:
        """`searches`: whether ranks may use different parameters. Then they exchange the names of
        those in every step, which cuts it."""
        self._names = {p: name for name, p in module.named_parameters()}
        self._ranks = Ranks(distributed.get_world_size(), tuple(self._names), bucket_bytes)
        self._searches = searches
        self.blocked = False
        """Whether this micro-batch is not the last of its update."""
        self._is_due = False
        self._hooks: list[Any] = []
        self._changed: dict[Parameter, None] = {}
        """The parameters whose gradients have changed since they were averaged."""

    def begin(self) -> None:
        """Begin a micro-batch."""
        self.end()
        self._is_due = False
        for parameter in self._names:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))

    def end(self) -> None:
        """Remove the hooks from the module."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, parameter: Any) -> None:
        if not self.blocked and not self._is_due:
            self._is_due = True
            at_end_of_backward(self._average)
        self._changed[parameter] = None

    def _average(self) -> None:
        self._is_due = False
        changed, self._changed = self._changed, {}
        if self._searches:
            used = {*chain(*gather_objects([self._names[p] for p in changed]))}
            for p, name in self._names.items():
                if name in used and p not in changed:
                    p.grad, changed[p] = torch.zeros_like(p), None
        gradients = {p: p.grad for p in changed if p.grad is not None}
        with torch.no_grad():
            self._ranks.average(gradients, self._names)


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
            offset = 0
            for p in bucket:
                views.append(flat.as_strided(p.size(), p.stride(), offset))
                # As torch's reducer does, divide first and sum afterwards.
                torch.mul(gradients[p], 1.0 / self.size, out=views[-1])
                offset += p.numel()
            if number == 0:
                compare(flat, "\n".join(_describe(b, names) for b in buckets))
            with naming_lost_ranks(None):
                distributed.all_reduce(flat)
            for p, view in zip(bucket, views, strict=True):
                gradients[p].copy_(view)

    def _buckets(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        """Group parameters whose gradients are summed at once: one dtype, at most
        `bucket_bytes`."""
        wanted = {id(p): p for p in parameters}
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
    """Raise on every rank unless all of them are about to sum the same gradients. `before`: the
    tensor that is summed next, which waits for this. `contents`: a line for each bucket."""
    mine = torch.frombuffer(bytearray(sha256(contents.encode()).digest()), dtype=torch.uint8)
    size = distributed.get_world_size()
    with naming_lost_ranks(None):
        seen = [torch.empty_like(mine) for _ in range(size)]
        distributed.all_gather(seen, mine)
        if not all(torch.equal(other, mine) for other in seen):
            raise StepError(difference(gather_objects(contents.splitlines())))


def difference(contents: Sequence[Sequence[str]]) -> str:
    """Describe how the `contents` of the ranks differ; empty if they agree."""
    rank = next((n for n, lines in enumerate(contents) if lines != contents[0]), 0)
    if not rank:
        return ""
    ours, theirs = set(contents[0]), set(contents[rank])
    return (
        f"rank {rank} has other gradients in this step than rank 0:"
        f" {'; '.join(sorted(theirs - ours))[:300] or 'fewer of them'}, against"
        f" {'; '.join(sorted(ours - theirs))[:300] or 'fewer of them'}. All ranks must train the"
        " same parameters in the same step"
    )


def _describe(bucket: Sequence[Parameter], names: Mapping[Parameter, str]) -> str:
    numel = sum(p.numel() for p in bucket)
    return f"{numel} {bucket[0].dtype} of {', '.join(names[p] for p in bucket)}"


def _nbytes(*parameters: Parameter) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
