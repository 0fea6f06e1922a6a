"""Records what a step does, op by op, under fake tensors: nothing is computed or allocated.

    user's step -> autograd -> Recorder -> Fakes (fakes.py)      a Tape: ops over storages
                                  |
    real tensors that the step closes over (parameters, buffers, constants) become fakes here

The recorder sits below autograd and autocast, so it sees the very kernels that eager runs, forward
and backward. A fake tensor's storage says exactly what aliases what, so views are not recorded.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.gate import stand_aside
from offload.measuring.fake_answers import Learned, corrected
from offload.program.frames import say_frame, user_frame
from offload.program.kernels import Call, Value
from offload.program.layouts import check_dense
from offload.program.trees import leaves, mapped, tensors_of
from offload.torch_seams import (
    FakeTensor,
    TorchDispatchMode,
    current_autograd_node,
    disable_current_modes,
    get_current_dispatch_mode,
    is_wrapper_subclass,
    next_sequence_number,
    pytree,
    schema_of,
    sequence_number,
    storage_key,
)
from offload.tracing import collectives, op_effects
from offload.tracing.cpu_values import FOLDED, OWN, fold, is_cpu_value, moved, refused
from offload.tracing.draws import Clock, arguments, draws, undrawn
from offload.tracing.fakes import Fakes
from offload.tracing.questions import ASKING, AssumedValues, Questions
from offload.tracing.tape import BACKWARD, FORWARD, Op, Storage, Tape
from offload.watching.executed_code import calls_unnoted

LIFT, DEVICE = torch.ops.aten.lift_fresh.default, torch.ops.prim.device.default


class Recorder(TorchDispatchMode):
    """Records every op onto a tape."""

    def __init__(
        self,
        modules: Mapping[int, str],
        clock: Clock,
        device: torch.device,
        learned: Learned,
        assumed: AssumedValues | None = None,
    ) -> None:
        """`modules`: the path of every module, by its id. `device`: where the step is to run.
        `learned`: what its fakes would say wrong. `assumed`: what the step is answered when it asks
        for values; None refuses that."""
        super().__init__()
        self.device = device
        self._learned = learned
        self._assumed = assumed
        self._questions: Questions | None = None
        self._clock = clock
        self.tape = Tape()
        self.inputs: list[Value] = []
        self._batch: list[torch.Tensor] = []
        self.met: list[tuple[torch.Tensor, bool, torch.Tensor | None]] = []
        """The user's tensors that the step used, their `requires_grad` and their `.grad` before
        it."""
        self._fakes = Fakes()
        self._modules = modules
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[int, FakeTensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._by_sequence: dict[int, tuple[str, str]] = {}
        self._taken: dict[str, int] = {}
        self.began: dict[int, tuple[bool, torch.Tensor | None]] = {}
        """By the id of a tensor: `requires_grad` and `.grad` before a step that changes them."""
        self.phase = FORWARD
        """The phase of the ops that are recorded next."""

    def run(self, step: Callable[..., Any], batch: Sequence[torch.Tensor]) -> Any:
        """Run a step without computing anything. Returns its result in fake tensors."""
        inputs = self._batch = [self._input(t, f"input.{n}") for n, t in enumerate(batch)]
        if self._assumed is not None:
            self._questions = Questions(self, self._recorded, self._assumed, batch)
        with self._fakes, self:
            result = step(*inputs)
        self._clock.check_all("in the step")
        return result

    def _input(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A fake for a tensor of the batch, with the same layout and a storage of its own."""
        with self._fakes:
            if torch.ops.aten.is_non_overlapping_and_dense(tensor):
                fake = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            else:
                fake = torch.empty(tensor.size(), dtype=tensor.dtype, device=self.device)
        fake.requires_grad_(tensor.requires_grad)
        self._add(fake, "input", name=name)
        self.inputs.append(self.value(fake))
        return fake

    def value(self, tensor: torch.Tensor) -> Value:
        """Where a tensor of the step, or of the user, lies."""
        fake = self._fake(tensor)
        number = self._numbers[storage_key(fake)]
        storage = self.tape.storages[number]
        storage.kind = {FOLDED: "literal", OWN: "real"}.get(storage.kind, storage.kind)
        return _value(fake, number)

    def uses(self, tensor: torch.Tensor) -> bool:
        """Whether the step has used a tensor of the user's."""
        return id(tensor) in self._stand_ins

    def makes(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage, so that it is no input and not the user's."""
        number = self._numbers.get(storage_key(self._fake(tensor)))
        return number is not None and self.tape.storages[number].kind == "made"

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether the step has changed the tensor's bytes in place."""
        number = self._numbers.get(storage_key(self._fake(tensor)))
        return number is not None and self.tape.storages[number].written

    def _outlives(self, fake: torch.Tensor) -> bool:
        """Whether this very tensor, and not a view of it, is the user's."""
        return id(fake) in self._originals or any(fake is given for given in self._batch)

    def described(self, result: Any) -> str:
        """The result of a step as text, for comparing two traces."""

        def describe(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self.value(leaf)
            plain = isinstance(leaf, int | float | complex | str | bytes | None)
            return leaf if plain else type(leaf).__name__

        return repr(pytree.tree_map(describe, result))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:  # most calls are such a question, and nobody records it
            return self._fake(args[0]).device
        with calls_unnoted():  # no code of the user runs in here, and noting costs time
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        stand_aside()
        if func is LIFT and not isinstance(args[0], FakeTensor):
            return self._literal(args[0])
        name = schema_of(func).name.split("::")[1]
        if op_effects.resizes(name, args):
            raise CaptureError(
                f"{say_frame(user_frame())}: {name} changes the size of a tensor in place, and a"
                " planned tensor cannot grow. Make a new tensor instead"
            )
        fake_args, fake_kwargs = mapped((args, kwargs), self._fake)
        if op_effects.relays(name) and self._outlives(fake_args[0]):
            raise CaptureError(
                f"{say_frame(user_frame())}: {name} gives a tensor of the module or of the batch"
                " another shape in place, which a planned step cannot do. Use"
                f" {name[:-1]}, which returns a view"
            )
        asked = self._questions if func in ASKING else None
        if asked and (answered := asked.answer(func, fake_args, fake_kwargs)):
            return answered[0]
        return self._recorded(func, fake_args, fake_kwargs)

    def _recorded(self, func: Any, fake_args: Any, fake_kwargs: Any) -> Any:
        """The result of an op, which is put onto the tape."""
        name = schema_of(func).name.split("::")[1]
        if collectives.is_wait(func):
            return fake_args[0]
        if collectives.is_collective(func):
            fake_args, result = collectives.traced(func, self.device, fake_args, fake_kwargs)
        else:
            result = func(*undrawn(fake_args), **undrawn(fake_kwargs))
            if op_effects.relays(name):
                return result  # the fake itself has changed, and no byte has
            result = self._learned.layouts.as_it_is(func, name, fake_args, fake_kwargs, result)
            result = self._as_measured(func, fake_args, fake_kwargs, result)
        if not self._handle_on_cpu(func, name, fake_args, fake_kwargs, result):
            self._record(func, name, fake_args, fake_kwargs, result)
        return mapped(result, lambda out: self._originals.get(id(out), out))

    def _as_measured(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The result as the kernel's own, where the fake's was found to be wrong."""
        if not self._learned.errs(func):
            return result
        call = Call(func, *mapped((tuple(args), dict(kwargs)), self._given))
        answer = self._learned.of(call, self.device)
        return result if answer is None else corrected(answer, result)

    def _handle_on_cpu(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Handle an op that runs on the CPU in a step for a GPU. False: record it like any
        other."""
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        if not any(is_cpu_value(t, self.device) for t in (*given, *made)):
            return False
        if (
            not any(is_cpu_value(t, self.device) for t in made)
            and (values := moved(name, args, result, self._folded)) is not None
        ):
            self._add(result, "literal", values, name="literal")
            return True
        changed = op_effects.written_arguments(func, name, args, kwargs)
        fresh = [t for t in made if storage_key(t) not in self._numbers]
        if not any(is_cpu_value(t, self.device) for t in (*fresh, *changed)):
            return False
        folded = fold(func, args, kwargs, result, changed, self._folded)
        if folded is None:
            raise refused(self._place(name)[1], name, self.device, given)
        for fake, values in folded:
            self._add(fake, FOLDED, values, name="literal")
        return True

    def _folded(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The present values of a tensor made of numbers in the step's code; None for other
        tensors."""
        number = self._numbers.get(storage_key(tensor))
        if number is None or self.tape.storages[number].kind != FOLDED:
            return None
        values = self.tape.storages[number].tensor
        assert values is not None
        with disable_current_modes():
            return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _given(self, tensor: torch.Tensor) -> Value | torch.Tensor:
        """What the op gets for this tensor at every run."""
        number = self._number(tensor)
        storage = self.tape.storages[number]
        if not is_cpu_value(tensor, self.device):
            return _value(tensor, number)
        assert storage.tensor is not None
        with disable_current_modes():
            own = storage.tensor.detach()
            if storage.kind == FOLDED:
                own = own.clone()  # because the step may change it later
            return own.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        path, where = self._place(name)
        random = draws(func, args, kwargs)
        if random:
            self._clock.draw(args, kwargs, where)
        outs = leaves(result)
        for argument, mask in arguments(func, args, kwargs):
            if argument.name == "output_mask":  # the kernel does not make the others
                outs = [out if wanted else None for out, wanted in zip(outs, mask, strict=True)]
        made = [out for out in outs if isinstance(out, torch.Tensor)]
        fresh: list[int] = []
        outputs: list[Value | None] = []
        for out in outs:
            if isinstance(out, torch.Tensor):
                check_dense(out, where)
                key = storage_key(out)
                if key not in self._numbers:
                    fresh.append(self._add(out, "made", name=path))
                if (number := self._numbers[key]) in fresh:
                    outputs.append(_value(out, number))
                    continue
            outputs.append(None)
        if op_effects.allocates(name):
            return
        changed = [self._number(t) for t in op_effects.written_arguments(func, name, args, kwargs)]
        if not fresh and not changed and not collectives.is_collective(func):
            return  # a view, or a question about a shape
        read = op_effects.read_arguments(func, name, args, kwargs)
        reads = [self._number(t) for t in read if not is_cpu_value(t, self.device)]
        path = self._unique(path)
        for number in changed:
            storage = self.tape.storages[number]
            if storage.kind == "made" and not storage.written:
                storage.name = storage.name if storage.filled else path
            storage.written = True
        for number in fresh:
            self.tape.storages[number].filled = True
        for rank, number in enumerate(fresh):
            self.tape.storages[number].name = f"{path}.{rank}" if rank else path
        named_args, named_kwargs = mapped((tuple(args), dict(kwargs)), self._given)
        self.tape.ops.append(
            Op(
                func,
                named_args,
                named_kwargs,
                tuple(outputs) if fresh else (),
                tuple(dict.fromkeys(reads)),
                tuple(dict.fromkeys((*changed, *fresh))),
                tuple(dict.fromkeys(changed)),
                random,
                self.phase,
                path,
                where,
                op_effects.flops_of(func, args, kwargs, result),
                sum(t.numel() * t.element_size() for t in (*tensors_of((args, kwargs)), *made)),
                torch.is_grad_enabled(),
            )
        )

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        """The fake that stands in for a user's tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if is_wrapper_subclass(tensor):
            return self._fake(collectives.inner_tensor(tensor))
        if (known := self._stand_ins.get(id(tensor))) is not None:
            return known
        own = tensor.requires_grad, tensor.grad if tensor.is_leaf else None
        self.met.append((tensor, *self.began.get(id(tensor), own)))
        fake = self._fakes.from_tensor(tensor, static_shapes=True)
        self._stand_ins[id(tensor)] = fake
        self._originals[id(fake)] = tensor
        if storage_key(fake) not in self._numbers:
            self._add(fake, OWN if is_cpu_value(fake, self.device) else "real", tensor)
        return fake

    def _literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor written in the step's code, such as `torch.tensor(2.0)`. Every step makes it
        anew."""
        fake = LIFT(tensor)
        with disable_current_modes():
            copy = tensor.clone()
        kind = FOLDED if is_cpu_value(fake, self.device) else "literal"
        self._add(fake, kind, copy, name="literal")
        return fake

    def _add(
        self, fake: torch.Tensor, kind: str, tensor: torch.Tensor | None = None, name: str = ""
    ) -> int:
        storage = fake.untyped_storage()
        number = len(self.tape.storages)
        self._numbers[storage_key(fake)] = number
        self.tape.storages.append(Storage(storage.nbytes(), storage, kind, tensor, name))
        return number

    def _number(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        if key not in self._numbers:  # the fake mode made it, for example for a wrapped number
            self._add(tensor, "made", name="unknown")
        return self._numbers[key]

    def _place(self, name: str) -> tuple[str, str]:
        """A readable name and the user's line. A backward op has those of its forward op."""
        node = current_autograd_node()
        if node is None:
            frame = user_frame()
            path = f"{self._module()}{name}"
            where = say_frame(frame, short=True)
            # Autograd made the op's node right before the op was dispatched to here.
            own = self._taken.get(path, 0) + 1
            place = (path if own == 1 else f"{path}.{own}", where)
            newest = next_sequence_number() - 1
            self._by_sequence.setdefault(newest, place)
            return path, where
        self.phase = BACKWARD
        forward, where = self._by_sequence.get(sequence_number(node), ("", ""))
        own = "backward" if "backward" in name else f"backward.{name}"
        return f"{forward}.{own}" if forward else own, where

    def _module(self) -> str:
        """`layer1.0.conv1.`: the innermost module whose method is running."""
        frame = sys._getframe(1)
        while frame is not None:
            if "self" in frame.f_code.co_varnames[:1]:
                path = self._modules.get(id(frame.f_locals.get("self")))
                if path is not None:
                    return f"{path}." if path else ""
            frame = frame.f_back
        return ""

    def _unique(self, name: str) -> str:
        self._taken[name] = self._taken.get(name, 0) + 1
        return name if self._taken[name] == 1 else f"{name}.{self._taken[name]}"


def current_recorder() -> Recorder:
    """The recorder of the trace that is running."""
    recorder = get_current_dispatch_mode()
    assert isinstance(recorder, Recorder)
    return recorder


def _value(tensor: torch.Tensor, number: int) -> Value:
    return Value(
        number,
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )
