"""What happens to a peer at a certain moment of a certain step, without a word in the product.

    Fault("kill", "mid_reduce", step=5, members=4)

The moments are found by wrapping what a step calls. All are in the peer's own process:

    lane          before lanes of the step                 gate        on the way to a generation
    compute       after lanes of the step                  forming     before the group is formed
    before_reduce before anything is sent                 checkpoint  the file is written, unnamed
    mid_reduce    sums were exchanged, not gathered       giving      a part of the state is given
    after_reduce  the total is here                       copying     the state is here
    vote          the vote was sent, no answer was read   batch_end   after the batch
    voted         all totals are equal
    applied       the step is in the weights
"""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainers import atomic_checkpoint
from trainers.elastic.peer import anchor_link, donated_state, donor, swarm_commits
from trainers.elastic.reducing import canonical, group
from trainers.elastic.work import digests
from trainers.elastic.work.plain_work import PlainWork

PHASES = (
    "compute", "before_reduce", "mid_reduce", "after_reduce", "vote", "voted", "applied",
    "checkpoint",
)  # fmt: skip
"""The eight at which the fault table kills."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One."""

    do: str
    """kill, kill_other, stop, term, interrupt, flip, nan, disk, cut, wait, hold"""
    at: str
    step: int
    """It happens at this step or a later one: so many steps were applied before."""
    members: int = 1
    """It happens only while the generation has so many members, or more."""
    seconds: float = 0.0
    until: int = 0
    """hold: wait before this step until there are so many members."""
    pid: int = 0
    """kill_other: whom."""


class Faults:
    """Of one peer. Each fault happens once, and leaves `FOLDER/happened.jsonl`."""

    def __init__(self, wanted: Sequence[Fault], out: Path) -> None:
        self.wanted = list(wanted)
        self.module: torch.nn.Module | None = None
        self.strategy: Any = None
        self._happened = out.joinpath("happened.jsonl").open("a", buffering=1)
        self._step = 0
        self._voting = False

    def reached(self, at: str, step: int | None = None) -> None:
        """Do what was asked for at this moment."""
        step = self._step if step is None else step
        for fault in list(self.wanted):
            if fault.at != at or step < fault.step or self._members() < fault.members:
                continue
            self.wanted.remove(fault)
            told = {"do": fault.do, "at": at, "step": step, "when": time.monotonic()}
            self._happened.write(json.dumps(told) + "\n")
            self._do(fault)

    def _members(self) -> int:
        view = getattr(self.strategy, "view", None)
        return 1 if view is None else len(view.members)

    def _do(self, fault: Fault) -> None:
        match fault.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_other":
                os.kill(fault.pid, signal.SIGKILL)
            case "cut":
                cut_links()
            case "stop":
                # Sent to this very thread, it stops here, and the others with it. Sent to the
                # process, another thread takes it, and this one runs on meanwhile.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "interrupt":
                signal.raise_signal(signal.SIGINT)
            case "wait":
                threading.Event().wait(fault.seconds)
            case "nan":
                module: Any = self.module
                module.no_number = True
            case "disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            case "hold":
                pass  # `_hold` does it, where newcomers get the state meanwhile.
            case "flip":
                assert self.module is not None
                weights = next(iter(self.module.parameters())).detach()
                part = fault.step % digests.PARTS  # which is compared at this step
                weights.view(-1).view(torch.int32)[weights.numel() * part // digests.PARTS] ^= 1
            case other:
                raise ValueError(f"no fault is called {other!r}")

    # ---- the moments ----------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap what a step calls."""
        compute, begin = PlainWork.compute, PlainWork.begin
        commits = swarm_commits.SwarmCommits

        def begins(work: PlainWork, step: int) -> None:
            self._step = step
            begin(work, step)

        def computes(work: PlainWork, lanes: Sequence[int]) -> int:
            self.reached("lane")
            count = compute(work, lanes)
            self.reached("compute")
            return count

        patched: Any = PlainWork
        patched.begin, patched.compute = begins, computes
        self._around(swarm_commits, "reduce_in_order", "before_reduce", "after_reduce")
        self._around(canonical, "_gather", "mid_reduce", "")
        self._around(swarm_commits, "form_group", "forming", "")
        self._around(donated_state, "put_together", "copying", "")
        self._around(donor, "payloads_of", "giving", "")
        self._around(atomic_checkpoint.os, "fsync", "checkpoint", "")
        applied, vote = commits.applied, commits._vote
        all_gather, attempt = group.Group.all_gather, commits._attempt
        gate = anchor_link.AnchorLink.gate

        def votes(of: Any, held: Any) -> bool:
            self._voting = True
            try:
                equal = vote(of, held)
            finally:
                self._voting = False
            self.reached("voted")
            return equal

        def gathers(of: Any, *args: Any, **kwargs: Any) -> Any:
            work = all_gather(of, *args, **kwargs)
            if self._voting:
                self.reached("vote")
            return work

        def applies(of: Any, commit: Any) -> None:
            applied(of, commit)
            self.reached("applied", commit.step)

        def attempts(of: Any, *args: Any) -> Any:
            self._hold(of)
            return attempt(of, *args)

        def gates(of: Any, *args: Any, **kwargs: Any) -> Any:
            self.reached("gate")
            return gate(of, *args, **kwargs)

        patched: Any = commits
        patched.applied, patched._vote, patched._attempt = applies, votes, attempts
        of_groups: Any = group.Group
        of_groups.all_gather = gathers
        of_links: Any = anchor_link.AnchorLink
        of_links.gate = gates

    def _hold(self, of: Any) -> None:
        for fault in [f for f in self.wanted if f.do == "hold" and self._step >= f.step]:
            members, orders = len(of.form.view.members), of._link.orders
            while members < fault.until and not orders.announced:
                of._give()
                orders.check_generation()
                threading.Event().wait(0.005)
            if members >= fault.until:
                self.wanted.remove(fault)

    def _around(self, where: Any, name: str, before: str, after: str) -> None:
        call: Callable[..., Any] = getattr(where, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.reached(before)
            result = call(*args, **kwargs)
            if after:
                self.reached(after)
            return result

        setattr(where, name, wrapped)


def cut_links() -> None:
    """End all connections between this peer's group and others; those to the anchor stay."""
    known = python_sockets()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            link = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with link:
            # Gloo's sockets are of no object of Python's; those of the wire are.
            if link.type == socket.SOCK_STREAM and fd not in known:
                with contextlib.suppress(OSError):
                    link.getpeername()
                    link.shutdown(socket.SHUT_RDWR)


def python_sockets() -> set[int]:
    return {one.fileno() for one in gc.get_objects() if isinstance(one, socket.socket)}
