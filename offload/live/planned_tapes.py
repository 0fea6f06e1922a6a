"""The plans of a session's tapes, which share one runner and its arenas.

tape         no cut               one part, which runs at the step's end
tape | cut | tape                 two: what is made before a cut and used after it has a home
                                  until the step is over, as a weight has for good
"""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload.graph.taskgraph import Role, TaskGraph
from offload.live.graphs import TapeEnds, Weight, graph_of
from offload.live.lanes import BEGINS, give_own_generators
from offload.live.runner_plans import RunnerPlans
from offload.live.tape_calls import TapeReader
from offload.live.tried_costs import costs_without_moves
from offload.live.weights import LiveWeights
from offload.lowering.passes import MERGES, PASSES
from offload.lowering.pointwise_groups import group_tasks
from offload.lowering.update_splits import split_updates
from offload.lowering.whole_updates import merge_whole_updates
from offload.measuring.kept_costs import KeptCosts, MeasuredCosts
from offload.measuring.profiling import measure_tasks
from offload.memory.collector import collector_paused
from offload.memory.cpu_shim import available

log = logging.getLogger(__name__)

GROUP, GROUP_BYTES = 32, 1 << 20
"""A group of small kernels has at most so many, which touch at most so many bytes: an engine's
overhead is paid once a group."""
MOST_COPIED = 64 << 20
"""A step that is given more bytes runs at its end: copying them would take longer than it saves."""


GraphPass = Callable[[TaskGraph], TaskGraph]


def list_splits() -> Sequence[GraphPass]:
    """The passes that cut the updates of an optimizer. They need no costs."""
    return merge_whole_updates, split_updates


def group_small_kernels(graph: TaskGraph) -> TaskGraph:
    return group_tasks(graph, GROUP, GROUP_BYTES, any_kind=True)


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """What a plan of a tape's part between two cuts needs, and the passes that it serves."""

    ends: TapeEnds
    kind: bytes
    held: frozenset[int]
    varying: frozenset[int]
    crossing: Mapping[int, tuple[int, Weight]]
    """By slot: the number and the place of what the cut at its end is crossed by."""
    unwritten: Mapping[int, int]
    """By slot: the bytes of memory that is only allocated, and held."""

    def serves(self, tape: Any, held: Collection[int]) -> bool:
        """Whether it computes what this pass is to compute."""
        return (
            self.kind == tape.kind
            and self.held.issuperset(held)
            and self.varying.issuperset(tape.varied)
        )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A pass that is ready to run by a plan."""

    tape: Any
    part: PlannedPart
    kernels: Callable[[], Sequence[torch.Tensor]]
    is_bound: bool
    """Whether nothing has to be planned any more."""
    device: torch.device

    def compute(self) -> tuple[Sequence[torch.Tensor], Mapping[int, torch.Tensor]]:
        """Run the kernels, in any thread. Returns what `finish` needs."""
        made = self.kernels()
        new = partial(torch.empty, dtype=torch.uint8, device=self.device)
        return made, {slot: new(nbytes) for slot, nbytes in self.part.unwritten.items()}

    def finish(self, made: tuple[Sequence[torch.Tensor], Mapping[int, torch.Tensor]]) -> None:
        """Give all that hold a tensor of the step its bytes."""
        outputs, unwritten = made
        for slot, tensor in zip(self.part.ends.outputs, outputs, strict=True):
            self.tape.hand_over(slot, tensor)
        for slot, (number, weight) in self.part.crossing.items():
            self.tape.cross(slot, number, weight.home)
        for slot, tensor in unwritten.items():
            self.tape.give_memory(slot, tensor)
        self.tape.mark_run()


class PlannedTapes:
    """Makes a plan for a part of a tape when its first pass is to run."""

    def __init__(
        self,
        core: Any,
        weights: LiveWeights,
        plans: RunnerPlans,
    ) -> None:
        self._core = core
        self._weights = weights
        self._planned: dict[Hashable, PlannedPart] = {}
        self._plans = plans
        kept = None if plans.cache is None else KeptCosts(plans.cache)
        self._measured = MeasuredCosts(kept)
        self.passes: Sequence[GraphPass] = (
            *list_splits(),
            self.measure_kernels,
            *PASSES,
            self._plans.place,
            *MERGES,
            group_small_kernels,
        )
        """They run in this order. `perfect-step bisect` leaves out the last ones."""

    def measure_kernels(self, graph: TaskGraph) -> TaskGraph:
        return measure_tasks(graph, self._measured)

    def begin(self) -> None:
        """The session is open."""
        if (shim := available()) is not None:
            self._core.reuse_blocks(shim.reuser)
        if not self._plans.moves:
            self._measured = costs_without_moves(self._core, self._weights.device)

    def run(self, tape: Any, held: Collection[int], at_home: Collection[int]) -> None:
        """Run the kernels of a pass since its last cut. What is held gets its bytes at once, or, if
        it is kept `at_home`, when somebody looks. Raises `CaptureError`, before anything runs, if
        they have no place in a plan."""
        if (run := self.prepare(tape, held)) is not None:
            self._run_now(run)
            return
        key = tape.begin, tape.leaf
        with collector_paused():
            old = self._planned.get(key)
            part = self._planned[key] = self._make(key, tape, held, old, at_home)
            self._run_now(self._begin(key, tape, part))

    def prepare(
        self, tape: Any, held: Collection[int], *, copies: bool = False
    ) -> "PlannedRun | None":
        """What runs the kernels of a pass that has a plan already; None if it has none. `copies`:
        what the step was given may change meanwhile, so it is copied."""
        key = tape.begin, tape.leaf
        self._weights.take_places(tape)
        part = self._planned.get(key)
        if part is None or (copies and part.ends.input_bytes > MOST_COPIED):
            return None
        tape.hide_shown()  # holders of what crossed last time keep it, in their own memory
        self._core.vacate({number for number, _ in part.crossing.values()})
        return self._begin(key, tape, part, copies=copies) if part.serves(tape, held) else None

    def _begin(
        self, key: Hashable, tape: Any, part: PlannedPart, *, copies: bool = False
    ) -> "PlannedRun":
        part.ends.numbers.take(tape)
        tape.hide_shown()
        bytes_of = tape.copied_bytes if copies else tape.given_bytes
        batch = [bytes_of(given.slot, given.start, given.nbytes) for given in part.ends.inputs]
        kernels = partial(self._plans.run, key, batch)
        return PlannedRun(tape, part, kernels, self._plans.has(key), self._weights.device)

    def _run_now(self, run: "PlannedRun") -> None:
        try:
            made = run.compute()
        finally:
            self._core.clear_pending()
        run.finish(made)

    def _make(
        self,
        key: Hashable,
        tape: Any,
        held: Collection[int],
        old: PlannedPart | None,
        at_home: Collection[int],
    ) -> PlannedPart:
        """`old`: what was planned before serves no longer."""
        kept, varying = frozenset(held), frozenset(tape.varied)
        if old is not None:
            kept, varying = kept | old.held, varying | old.varying
        self._core.clear_pending()
        weights = self._weights.adopt_weights(tape)
        varying |= _numbers_of_updates(tape, weights) | _find_seeds(tape)
        reader = TapeReader(self._core, tape, varying, self._weights.device)
        crossing = dict(old.crossing) if old is not None else {}
        crosses = kept & reader.written & {*at_home} - {*weights, *crossing}
        states = self._weights.states_among(tape, crosses)
        for slot in crosses:
            crossing[slot] = self._weights.place_across_cut(reader.nbytes[slot], states.get(slot))
        weights |= {slot: weight for slot, (_, weight) in crossing.items()}
        given = [n for n, origin in enumerate(tape.origins) if origin == self._core.GIVEN]
        graph, ends = graph_of(reader, given, weights, kept, self._weights.alive_weights())
        for run_pass in self.passes:
            graph = run_pass(graph)
        log.info(
            "a part of a step was captured: %d calls, %d tasks after the passes",
            len(reader.calls),
            len(graph.tasks),
        )
        self._plans.add(key, give_own_generators(graph))
        unwritten = {s: reader.nbytes[s] for s in (kept & reader.allocated) - reader.written}
        varying = frozenset(reader.varying)
        return PlannedPart(ends, tape.kind, kept, varying, crossing, unwritten)

    def forget(self) -> None:
        """Drop all parts. Weights stay where they are."""
        self._planned.clear()
        self._measured.forget()
        self._plans.forget()
        self._weights.forget_places()

    def close(self) -> None:
        """Give every tensor memory of its own again."""
        self._plans.close()


def _find_seeds(tape: Any) -> frozenset[int]:
    """The seeds of the lanes."""
    begun = (node for node in tape.nodes[tape.begin :] if node.op == BEGINS)
    return frozenset(seed.index for node in begun for seed in node.arguments)


def _numbers_of_updates(tape: Any, weights: Mapping[int, Weight]) -> frozenset[int]:
    """The numbers since the first write to a weight that is trained: rates and corrections, which
    differ from step to step."""
    trained = {s for s, w in weights.items() if w.role in (Role.PARAMETER, Role.STATE)}
    nodes = tape.nodes[tape.begin :]
    first = next((n for n, node in enumerate(nodes) if not trained.isdisjoint(node.written)), None)
    return frozenset[int]() if first is None else frozenset(nodes[first].numbers_since(nodes[-1]))
