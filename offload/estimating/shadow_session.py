"""A session in which nothing has bytes: a module's steps, on whatever device, become graphs.

    with ShadowSession(module, optimizer, device="cuda:0") as session:
        for _ in range(2):          the first step makes the optimizer's states
            with session.step():
                module(session.without_bytes(batch)).backward(); optimizer.step()
    session.take_graphs()           one for each step

The module's tensors may be on `meta`, or be real: those are left alone. What the host computes
with, such as an optimizer's counter, is computed. So is a value that the step asks for, if only its
batch decides it. A step that asks for another one is refused.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from offload.errors import CaptureError
from offload.estimating.absent_card import absent_card
from offload.estimating.lstm_workspace import list_lstm_workspaces
from offload.graph.taskgraph import Role, TaskGraph
from offload.live.graphs import Weight, graph_of
from offload.live.placing import list_states
from offload.live.session import LiveSession
from offload.live.tape_calls import TapeReader
from offload.live.weights import LiveWeights
from offload.program.frames import format_frame, user_frame
from offload.torch_seams import is_wrapper_subclass, pytree, register_shape_functions


class ShadowSession(LiveSession):
    """Records steps, and runs no kernel of them."""

    def __init__(
        self,
        module: torch.nn.Module,
        *optimizers: torch.optim.Optimizer,
        device: torch.device | str = "cpu",
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        """`capability`: of the card, which decides between kernels of attention."""
        register_shape_functions()
        super().__init__(module, *optimizers, device=device, runs=False)
        if self.weights.device.index:
            raise CaptureError(f"device {device}: an estimate is of one card: say cuda:0")
        self._module, self._optimizers, self._capability = module, optimizers, capability
        self.tapes = self._graphs = TapeGraphs(self._core, self.weights)  # pyright: ignore

    def take_graphs(self) -> list[TaskGraph]:
        """The graphs of the steps since they were taken last."""
        taken, self._graphs.graphs = self._graphs.graphs, []
        return taken

    def without_bytes(self, batch: Any) -> Any:
        """A batch on the device, without bytes. Values that depend on nothing else are computed."""
        return pytree.tree_map_only(torch.Tensor, self._hide_input, batch)

    def _hide_input(self, tensor: torch.Tensor) -> torch.Tensor:
        _check_strided([tensor])
        with self.suspended():
            [shadow] = self._core.without_bytes([tensor], str(self.weights.device))
            if tensor.device.type == "cpu":
                self._core.know(shadow, tensor)
        return shadow

    def _take_over(self) -> None:
        self._core.only_estimate()
        self.kernels.open(self._handle.serve)
        if self.weights.device.type == "cuda":
            self._open.enter_context(absent_card(self._core, self._capability))
        self._watch_entrances()
        self._tensors.enter_context(self._hide_tensors())

    @contextmanager
    def _hide_tensors(self) -> Iterator[None]:
        """Within it, all tensors of the module are on the device and have no bytes. Those that the
        host counts with are copies."""
        on_cpu = self.weights.device.type == "cpu"
        before = [{p: dict(s) for p, s in each.state.items()} for each in self._optimizers]
        named = {t: None for t, _, _ in self.weights.list_named()}
        placed = [state for state, _ in list_states(self._optimizers)]
        on_device = {*self._module.parameters(), *self._module.buffers(), *placed}
        _check_strided(named)
        with self.suspended():
            kept = {tensor: tensor.detach() for tensor in named}
            hidden = [t for t in named if t in on_device and not (on_cpu and _is_number(t))]
            made = self._core.without_bytes([kept[t] for t in hidden], str(self.weights.device))
            shadows = dict(zip(hidden, made, strict=True))
            holders = dict.fromkeys((*self.weights.parameters, *named))
            gradients = {t: t.grad for t in holders if t.is_leaf}
            for tensor, there in kept.items():
                tensor.grad = None
                self._core.become(tensor, shadows.get(tensor, there.clone()))
                if tensor in shadows and _is_number(there):
                    self._core.know(shadows[tensor], there)
        try:
            yield
        finally:
            with self.suspended():
                for tensor, there in kept.items():
                    tensor.grad = None
                    self._core.become(tensor, there)
                for tensor, gradient in gradients.items():
                    tensor.grad = gradient
            self.weights.put_states_back(before)

    def end_as_issued(self) -> None:
        """End a step that was interrupted. Nothing of it runs."""
        tape = self._core.end()
        tape.mark_run()
        self._core.clear_pending()
        tape.finish(set(), set())

    def _run(self, tape: Any, held: set[int], at_home: set[int]) -> bool:
        with self.suspended():
            self.tapes.run(tape, held, at_home)
        return True

    def _run_part(self, tape: Any) -> bool:
        why = self._core.refusal()
        line = format_frame(user_frame(), short=True) or "in the backward pass"
        raise CaptureError(
            f"{line}: {why.splitlines()[0]}. No kernel runs in an estimate, so each operation needs"
            " a function that finds its result's shape (torch.library.register_fake)"
            if why
            else f"{line}: the step asks for a value, or draws a shape from its data, and an"
            " estimate has no values: estimate the step without this line"
        )


def _check_strided(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `CaptureError` for a sparse tensor and its like."""
    for tensor in tensors:
        if tensor.layout != torch.strided or is_wrapper_subclass(tensor):
            raise CaptureError(
                f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has layout"
                f" {tensor.layout} or keeps its bytes in other tensors, so its size cannot be"
                " estimated: give the step plain tensors"
            )


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() == 1


class TapeGraphs:
    """Makes a graph of every part of a step, which is a whole step."""

    def __init__(self, core: Any, weights: LiveWeights) -> None:
        self._core = core
        self._weights = weights
        self.graphs: list[TaskGraph] = []

    def prepare(self, tape: Any, held: Collection[int], *, copies: bool = False) -> None:
        """There is never a plan already."""
        del tape, held, copies

    def run(self, tape: Any, held: Collection[int], at_home: Collection[int]) -> None:
        """Make the graph of a step that is over. Nothing runs."""
        del at_home
        self._core.clear_pending()
        reader = TapeReader(self._core, tape, (), self._weights.device)
        reader.nbytes |= dict(list_lstm_workspaces(reader.calls))
        origins = tape.origins
        weights = dict(self._find_weights(tape))
        given = [slot for slot, origin in enumerate(origins) if origin == self._core.GIVEN]
        for slot in {*tape.written} & {*given} - {*weights}:
            weights[slot] = _weight(f"tensor.{slot}", Role.BUFFER, tape.nbytes(slot))
        graph, _ = graph_of(reader, given, weights, held, [*weights.values()])
        self.graphs.append(graph)
        tape.mark_run()

    def _find_weights(self, tape: Any) -> Iterator[tuple[int, Weight]]:
        """By slot. Those that the step does not use have slots behind all others."""
        idle = count(len(tape.origins))
        seen: set[int] = set()
        for tensor, name, role in self._weights.list_named():
            identity = self._core.identity(tensor)
            if identity in seen or _is_number(tensor):
                continue
            seen.add(identity)
            slot = tape.slot_of(tensor)
            nbytes = self._core.nbytes(tensor)
            yield next(idle) if slot is None else slot, _weight(name, role, nbytes)

    def forget(self) -> None:
        """Keep the latest graph."""

    def close(self) -> None:
        """There is nothing to give back."""


def _weight(name: str, role: Role, nbytes: int) -> Weight:
    return Weight(name, role, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
