"""The graph of a function: its Python runs on shadows, and none of its kernels runs.

capture(step, x, y)   recorded   compared with a second time   a tape -> tasks over buffers

What the function's Python decides is decided at the capture, for every run. Its inputs have no
bytes, so a function that needs a value is refused. So is one that differs the second time, and an
optimizer's step, whose numbers differ. Whole training steps: `offload.within`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.errors import CaptureError
from offload.graph.taskgraph import TaskGraph
from offload.live.captured_graphs import (
    build_graph,
    find_users_tensors,
    list_alive_tensors,
    list_reached,
    modules_among,
    names_of,
)
from offload.live.core import load_core
from offload.live.entrances import ENTRANCES
from offload.live.placing import Device, device_of, place_tensors
from offload.lowering.passes import lower
from offload.measuring.profiling import measure_tasks
from offload.program.frames import format_frame, user_frame
from offload.torch_seams import is_set_up_by_a_call, pytree

INSTEAD = "Run the step within `offload.within`, where its Python runs every time"


def capture(
    step: Callable[..., Any],
    *example_inputs: torch.Tensor,
    device: Device = None,
) -> TaskGraph:
    """The graph of `step(*tensors)`, which returns tensors and closes over whatever it wants.

    `device`: where the step will run; by default where all its tensors are. The tensors themselves
    are not moved, and the capture changes none of them."""
    return lower(measure_tasks(capture_kernels(step, *example_inputs, device=device)))


def capture_kernels(
    step: Callable[..., Any],
    *example_inputs: torch.Tensor,
    device: Device = None,
) -> TaskGraph:
    """The graph before it is lowered and measured: a task for every kernel."""
    for number, given in enumerate(example_inputs):
        if not isinstance(given, torch.Tensor):
            raise CaptureError(
                f"input {number} is a {type(given).__name__}, and a step takes tensors. Close over"
                " what does not change, or turn it into a tensor"
            )
    reached = list_reached(step)
    inside = torch.nn.ModuleList(modules_among(reached).values())
    place = device_of(device, example_inputs, (*inside.parameters(), *inside.buffers()))
    _check_set_up(inside)
    with _record(place) as core, place_tensors(core, inside, (), place) as places:
        kept = KeptTensors(inside, names_of(reached))
        try:
            before = _run(core, step, example_inputs, place)
            leaf, values = before.tape.leaf, _plain_values(before.result)
            del before
            kept.check(core)
            if not leaf:
                raise CaptureError("the step runs no operation, so there is nothing to capture")
            inputs, result, tape = _run(core, step, example_inputs, place)
            kept.check(core)
        except BaseException:
            _drop_gradients(core, list_alive_tensors())
            kept.put_back(core)
            raise
        del kept  # it holds the memory of the user's tensors
        ours = {id(each.tensor) for each in places.values()}
        users = find_users_tensors(core, tape, inputs, names_of(reached), ours)
        if lost := _drop_gradients(core, users.alive):
            raise CaptureError(
                f"the step leaves a gradient in the .grad of a tensor {lost}, and a graph has no"
                " place for it: return what torch.autograd.grad returns"
            )
        is_another = tape.recorded or tape.varied or tape.leaf != leaf
        if is_another or _plain_values(result) != values:
            _drop_gradients(core, list_alive_tensors())
            raise CaptureError(
                "the step does something else every time"
                + (f": {core.divergence()}" if tape.recorded else "")
                + f". {INSTEAD}"
            )
        with torch.inference_mode(False):
            graph = build_graph(core, tape, place, inputs, result, users)
    again = partial(_capture_again, step, place)
    return replace(graph, program=replace(graph.program, recapture=again))


def _check_set_up(inside: torch.nn.Module) -> None:
    for part in inside.modules():
        if is_set_up_by_a_call(part):
            raise CaptureError(
                f"{type(part).__name__}, a module of fully_shard, is set up by its first call, and"
                " a capture would leave it half set up: call the step once before the capture"
            )


def _capture_again(
    step: Callable[..., Any], device: torch.device, *inputs: torch.Tensor
) -> TaskGraph:
    return capture(step, *inputs, device=device)


@contextmanager
def _record(device: torch.device) -> Iterator[Any]:
    """Within it, operations are recorded and do not run."""
    core = load_core()
    with ExitStack() as open_:
        session = core.open(device.type, True, _line, _refuse_cut)
        open_.callback(session.close)
        core.only_record()
        open_.enter_context(ENTRANCES.watch(core))
        open_.callback(core.release_all)
        open_.callback(register_optimizer_step_pre_hook(_refuse_update).remove)
        yield core


def _line() -> str:
    return format_frame(user_frame(), short=True)


def _refuse_cut(_: object) -> NoReturn:
    raise CaptureError(
        f"{_line()}: the step needs a value, a tensor of the host's, or something else that has"
        f" to run at once, and a capture runs nothing. {INSTEAD}"
    )


def _refuse_update(optimizer: torch.optim.Optimizer, *_: object) -> NoReturn:
    raise CaptureError(
        f"the step calls {type(optimizer).__name__}.step(), whose numbers differ from step to step."
        f" {INSTEAD}"
    )


def _without_bytes(core: Any, given: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(given, device=device, requires_grad=given.requires_grad)
    core.drop(made)
    return made


class Recorded(NamedTuple):
    """What a step was given and returns, and its tape."""

    inputs: Sequence[torch.Tensor]
    result: Any
    tape: Any


def _run(
    core: Any,
    step: Callable[..., Any],
    example_inputs: Sequence[torch.Tensor],
    device: torch.device,
) -> Recorded:
    with torch.inference_mode(False):
        inputs = [_without_bytes(core, given, device) for given in example_inputs]
    core.begin("capture")
    try:
        result = step(*inputs)
    finally:
        tape = core.end()
        core.clear_pending()
    if tape.failed:
        raise CaptureError(f"the step has caught the error of a capture. {INSTEAD}")
    return Recorded(inputs, result, tape)


def _plain_values(result: Any) -> list[Any]:
    """What is returned besides tensors: numbers and text, as they are written."""
    plain = (int, float, complex, str, bytes)
    return [repr(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, plain)]


class KeptTensors:
    """The tensors that a step reaches, and the memory that they had before it."""

    def __init__(self, inside: torch.nn.Module, names: Mapping[torch.Tensor, str]) -> None:
        self._names = names
        self._memory = {tensor: tensor.detach() for tensor in names}
        self._parts = [
            (
                part,
                dict(
                    chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
                ),
            )
            for part in inside.modules()
        ]

    def put_back(self, core: Any) -> str:
        """Undo what the step has replaced. Returns the name of one, if there are any."""
        replaced = ""
        for part, tensors in self._parts:
            for name, tensor in tensors.items():
                if getattr(part, name, None) is not tensor:
                    setattr(part, name, tensor)
                    replaced = name
        for tensor, before in self._memory.items():
            if core.is_lost(tensor):
                tensor.data = before
                replaced = self._names[tensor]
        return replaced

    def check(self, core: Any) -> None:
        if replaced := self.put_back(core):
            raise CaptureError(
                f"the step puts another tensor, or other memory, in the place of {replaced}, and a"
                " graph writes into the tensors that there are: change it in place, as by copy_()."
                " If only the first call replaces it, call the step once before the capture"
            )


def _drop_gradients(core: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Drop the gradients that the step has left, and say of which shape one is."""
    lost = ""
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None and core.is_lost(tensor.grad):
            lost, tensor.grad = str(tuple(tensor.size())), None
    return lost
