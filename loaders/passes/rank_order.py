"""Which samples this rank serves in each pass: its share of an order that all ranks agree on.

    no sampler                      every world-th id of our own order       f(seed, pass)
    a sampler that names no rank    every world-th id that it draws          all ranks draw alike
    a sampler that names a rank     all ids that it draws                    a share already

Beginning a pass is something that all ranks do together: they compare what their shares depend on.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from loaders.arguments import Serving
from loaders.errors import LoaderError, StateError
from loaders.order.keyed_permutation import samples_per_rank, source_order
from loaders.order.reuse import Mode, ReuseBuffer, batches_per_pass
from loaders.passes.pass_run import PlannedPass
from loaders.sources.samplers import (
    NamedRank,
    earlier_draws,
    length_of,
    named_rank,
    sampler_order,
)
from loaders.workers.decode_work import PassOrder


@dataclass(frozen=True, slots=True)
class LoaderRanks:
    """Which of how many processes this one is. What is None is asked of torch.distributed."""

    given: tuple[int, int] | None

    def __post_init__(self) -> None:
        given = self.given
        if given is not None and not (isinstance(given, tuple) and 0 <= given[0] < given[1]):
            raise ValueError(
                f"rank must be a rank and the number of ranks, such as (0, 2), not {given!r}"
            )

    @property
    def rank(self) -> int:
        if self.given is not None:
            return self.given[0]
        return torch.distributed.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        if self.given is not None:
            return self.given[1]
        return torch.distributed.get_world_size() if _distributed() else 1

    @property
    def is_rank_known(self) -> bool:
        """Whether somebody says which of how many processes this one is."""
        return self.given is not None or _distributed()

    @property
    def all_together(self) -> bool:
        """Whether the loaders of all processes of torch.distributed serve one pass together."""
        processes = torch.distributed.get_world_size() if _distributed() else 1
        return processes > 1 and self.world_size == processes

    def largest(self, wish: int) -> int:
        """The largest wish of all ranks. Every rank has to call this at the same point."""
        if self.given is not None or not _distributed():
            return wish
        return max(self.gathered(wish))

    def gathered(self, told: Any) -> list[Any]:
        """What the loaders of all processes tell. All of them call this at the same point."""
        everybodys: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(everybodys, told)
        return everybodys


class PassOrders:
    """What the orders of a data set, of a stream and of whole batches have in common."""

    ranks: LoaderRanks
    uncompared_draws: Any = ""
    """What to say if ranks share what a sampler draws, and nothing can compare it."""
    named: Any = None
    """The rank whose share the sampler draws. None: it draws the order of all ranks."""
    foreseen: Any = False
    """Whether the order of the next pass may be asked for before this one ends."""
    in_dataset: Any
    """The number of samples of the data set. None: nobody knows."""
    share: Any
    """The number of samples that this rank serves in a pass."""

    @property
    def is_rank_known(self) -> bool:
        """Whether the rank is final. If it is not, torch.distributed may still be started."""
        return self.ranks.is_rank_known or self.named is not None

    @property
    def rank(self) -> int:
        named = None if self.ranks.is_rank_known else self.named
        return (named or self.ranks).rank

    @property
    def world_size(self) -> int:
        named = None if self.ranks.is_rank_known else self.named
        return (named or self.ranks).world_size

    def gather_from_ranks(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What the loaders of all ranks send, `mine` included, in the order of their ranks."""
        everybodys = sorted(self.ranks.gathered(mine), key=lambda sent: sent["rank"])
        for before, sent in pairwise(everybodys):
            if before["rank"] == sent["rank"]:
                raise LoaderError(
                    f"2 loaders say that they are rank {sent['rank']}, so both would serve the same"
                    " samples: give every process a rank of its own, or leave out rank="
                )
        return everybodys

    def batches(self, serving: Serving, mode: Mode, drop_last: bool) -> int | None:
        """The batches of a pass that is served like this. None: nobody knows."""
        if self.in_dataset is None:
            return None
        size = serving.fit_to_share(self.share, drop_last).batch_size
        whole = batches_per_pass(self.share, size, serving.reuse, mode, drop_last)
        return whole if serving.pass_limit is None else min(whole, serving.pass_limit)

    def within_share(self, serving: Serving, drop_last: bool) -> Serving:
        """How a pass is served: with batches of no more than this rank's share."""
        return serving.fit_to_share(self.share, drop_last)

    def close(self) -> None:
        """Let go of what is open."""

    def state(self, served: int) -> dict[str, Any] | None:
        """What a saved state says of a stream, `served` batches after the pass began."""

    def resume(self, told: dict[str, Any] | None, served: int) -> None:
        """Go on as a saved state says of a stream."""
        if told is not None:
            raise StateError(
                "the saved loader state is that of a stream, and this loader reads none: make the"
                " loader as it was made in that run"
            )


@dataclass(frozen=True, slots=True)
class RankOrder(PassOrders):
    """The samples of this rank, pass by pass."""

    dataset: Any
    sampler: Any
    seed: int
    shuffle: bool
    ranks: LoaderRanks

    @property
    def named(self) -> NamedRank | None:
        return None if self.sampler is None else named_rank(self.sampler)

    @property
    def samples(self) -> int:
        """The number of samples in an order, before it is shared out."""
        return len(self.dataset) if self.sampler is None else length_of(self.sampler)

    @property
    def in_dataset(self) -> int | None:
        return len(self.dataset)

    @property
    def foreseen(self) -> bool:
        return self.sampler is None

    @property
    def share(self) -> int:
        if self.named is not None:
            return self.samples
        return samples_per_rank(self.samples, self.world_size)

    def of_pass(self, pass_index: int) -> PassOrder:
        if self.sampler is None:
            ids = source_order(
                len(self.dataset),
                seed=self.seed,
                pass_index=pass_index,
                shuffle=self.shuffle,
                rank=self.rank,
                world_size=self.world_size,
            )
            return PassOrder(pass_index, ids)
        drawn = sampler_order(self.sampler, self.seed, pass_index)
        ids, ranks = drawn, self.world_size
        if self.named is None:  # the order is repeated at its end
            ids = np.resize(drawn, self.share * ranks)[self.rank :: ranks].copy()
        return PassOrder(pass_index, ids, earlier_draws(ids), _digest(drawn.tobytes()))

    def planned(
        self, plan: ReuseBuffer, order: PassOrder, first: int, batches: int | None
    ) -> PlannedPass:
        """The pass, entered before batch `first`."""
        assert batches is not None, "the data set has a length"
        return PlannedPass.entered(plan, order, first, batches)

    def with_seed(self, seed: int) -> "RankOrder":
        return replace(self, seed=seed)

    def check_ranks(self, order: PassOrder, batches: int | None) -> str:
        """Refuse a pass that the ranks would not serve alike, with `batches` still to come. Returns
        the digest of what a sampler drew; it begins with the rank if ranks could not compare."""
        mine = self._share_facts(order, batches)
        if not self.ranks.all_together:
            if mine["wrong"]:
                raise LoaderError(mine["wrong"])
            return order.drawn if self.named is None else f"rank {self.rank}: {order.drawn}"
        everybodys = self.gather_from_ranks(mine)
        if problem := next((sent["wrong"] for sent in everybodys if sent["wrong"]), None):
            raise LoaderError(mine["wrong"] or problem)
        for sent in everybodys[1:]:
            _compare(everybodys[0], sent)
        if self.named is None:
            return order.drawn
        return _digest("".join(sent["drawn"] for sent in everybodys).encode())

    def _share_facts(self, order: PassOrder, batches: int | None) -> dict[str, Any]:
        """All that the shares of a pass depend on."""
        named = self.named
        return {
            "rank": self.rank,
            "wrong": self._wrong_rank(named),
            "sampler": type(self.sampler).__name__,
            "shared": named is not None,
            "pass": order.pass_index,
            "samples": 0 if named else self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle if self.sampler is None else None,
            "order": "" if named else order.drawn or f"our own of seed {self.seed}",
            "drawn": order.drawn,
            "batches": batches,
        }

    def _wrong_rank(self, named: NamedRank | None) -> str:
        if named is None or self.ranks.given == (0, 1):  # this loader is to be alone
            return ""
        if (named.rank, named.world_size) == (self.rank, self.world_size):
            return ""
        return (
            f"the sampler {type(self.sampler).__name__} draws for rank {named.rank} of"
            f" {named.world_size}, but this process is rank {self.rank} of {self.world_size}: make"
            " the sampler for this rank, or give rank=(rank, ranks) as the sampler has them"
        )

    @property
    def uncompared_draws(self) -> str:
        alone = self.world_size == 1 or self.sampler is None or self.named is not None
        if alone or _distributed():
            return ""
        return (
            f"the sampler {type(self.sampler).__name__} names no rank, so every one of"
            f" {self.world_size} ranks takes its share of what it draws; nothing can compare their"
            " draws without torch.distributed: see that it draws the same on all of them"
        )


def _compare(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse two ranks that would not serve the same pass together."""
    here, there = f"rank {other['rank']}", f"rank {first['rank']}"
    sampler = other["sampler"]
    if first["shared"] != other["shared"]:
        one, all_ = (here, there) if other["shared"] else (there, here)
        raise LoaderError(
            f"the sampler draws the share of one rank on {one}, and the order of all on {all_}:"
            " give every rank the same kind of sampler"
        )
    differs = ["pass", "samples", "shuffle"]
    differs += ["seed"] if first["order"] != other["order"] else []  # a sampler may draw none of it
    for key in differs:
        if first[key] != other[key]:
            what = f"{other[key]} samples" if key == "samples" else f"{key} {other[key]}"
            raise LoaderError(
                f"the ranks do not share one order: there is {what} on {here}, but"
                f" {first[key]} on {there}; give every rank the same data set, seed and order"
                " (a loader without seed= takes that of rank 0), or rank=(0, 1) to a loader that"
                " serves its own rank alone"
            )
    if first["order"] != other["order"]:
        raise LoaderError(
            f"the sampler {sampler} draws another order on {here} than on {there}: let it draw the"
            " same on every rank; if it draws one rank's share, give it rank and num_replicas"
        )
    if first["batches"] != other["batches"]:
        raise LoaderError(
            f"there are {other['batches']} batches on {here}, but {first['batches']} on {there}"
            f" (sampler: {sampler}), so one would wait for the other for ever: give every rank as"
            " many samples, batch_size and reuse, or rank=(0, 1) where no rank waits for another"
        )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
