"""Gradients of a module that all ranks average at the end of a backward pass, as torch's DDP does.

backward ... g3 g2 g1 | averages of what has changed | hooks of the user, clipping, update
"""

from itertools import chain
from typing import Any

import torch
from torch import distributed

from offload.torch_seams import at_end_of_backward
from trainers.offloading.ranks import Parameter, Ranks


def gathered(mine: Any) -> list[Any]:
    """`mine` of every rank, in the order of the ranks."""
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, mine)
    return everybody


class LiveAverages:
    """Of one fit."""

    def __init__(self, module: torch.nn.Module, bucket_bytes: int, *, searches: bool) -> None:
        """`searches`: whether ranks may use different parameters. Then they ask each other in every
        step, which cuts it."""
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
        """Leave the module alone."""
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
            used = {*chain(*gathered([self._names[p] for p in changed]))}
            for p, name in self._names.items():
                if name in used and p not in changed:
                    p.grad, changed[p] = torch.zeros_like(p), None
        found = {p: p.grad for p in changed if p.grad is not None}
        with torch.no_grad():
            self._ranks.average(found, self._names)
