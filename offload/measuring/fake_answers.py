"""Compares what kernels return with what their fakes said in the trace, and learns from it.

    trace      out (8, 4)   workspace (0,)         a plan knows results only by their fakes
    measured   out (8, 4)   workspace (28672,)     Misjudged, before anybody reads the 0 bytes
    learned    this op over such arguments: out (8, 4), workspace (28672,)
    traced again, with what is learned

A fake may err about sizes (workspaces), types, strides, and about which results share memory. A
plan made of that would be wrong, or call other kernels than eager does. One pass over all kernels
tells as many wrong fakes as it can. What is given a result of a wrong size does not run in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.caching.plan_cache import PlanCache
from offload.errors import CaptureError
from offload.measuring.call_uses import Use
from offload.measuring.distinct_calls import at_zero, signature
from offload.measuring.kept_costs import KeptCosts
from offload.memory.placement import flat, name
from offload.program.kernels import Call, Value, alignment_on
from offload.program.layouts import KernelLayouts
from offload.program.trees import mapped
from offload.torch_seams import OpOverload, storage_key

ADVICE = "Write the step without this op, or report it"


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a kernel returned."""

    home: int
    """The address of its storage."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


Answer = tuple[Result | None, ...]
"""What a kernel returned, by position. The homes only tell which results share memory."""


class Misjudged(CaptureError):
    """Kernels return something else than what was traced."""

    def __init__(self, message: str, answers: dict[Any, Answer]) -> None:
        """`answers`: what kernels return, by their keys, as far as a trace can make use of it."""
        super().__init__(message)
        self.answers = answers


class Learned:
    """What the kernels of a step return where their fakes are wrong, and what they cost if that is
    kept."""

    def __init__(self, cache: PlanCache | None = None) -> None:
        """`cache`: where costs are kept for later starts of the same run."""
        self.kept = None if cache is None else KeptCosts(cache)
        self.layouts = KernelLayouts()
        self._answers: dict[Any, dict[Any, Answer]] = {}
        """By op, then by all of the call."""

    def add(self, answers: Mapping[Any, Answer]) -> bool:
        """Whether any of it is new, so that another trace differs."""
        new = {key: answer for key, answer in answers.items() if not _alike(answer, self._of(key))}
        for key, answer in new.items():
            self._answers.setdefault(key[0], {})[key] = answer
        return bool(new)

    def _of(self, key: Any) -> Answer | None:
        return self._answers.get(key[0], {}).get(key)

    def errs(self, op: Any) -> bool:
        """Whether the fakes of an op are known to be wrong somewhere."""
        return op in self._answers

    def of(self, call: Call, device: torch.device) -> Answer | None:
        """What is known about the results of a call in the trace."""
        return self._of(key_of(at_zero(call, alignment_on(device)), device))


def key_of(call: Call, device: torch.device) -> tuple[Any, ...]:
    """The key of a call at zero: the op of the trace and its arguments."""
    op = traced_op(call)
    return op, signature(replace(call, op=op, outputs=())), device


def traced_op(call: Call) -> Callable[..., Any]:
    """The op that the trace has for a call; something may wrap it (run_time_ops.py)."""
    return call.op if isinstance(call.op, OpOverload) else getattr(call.op, "op", call.op)


def results_of(returned: Any) -> Answer:
    """What a kernel returned; None for what is no tensor."""
    return tuple(
        Result(
            one.untyped_storage().data_ptr(), one.dtype, tuple(one.size()), tuple(one.stride())
        )
        if isinstance(one, torch.Tensor)
        else None
        for one in flat(returned)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """How a kernel's result differs from its fake's."""

    text: str
    position: int
    learnable: bool = True
    sized: bool = False
    """Whether it is of another size, so that no op may be given the made-up result."""


def differences(call: Call, results: Answer, given: int, use: Use) -> Iterator[Difference]:
    """How the results of a call differ from its outputs. `given`: the address of the memory that
    all arguments lie in."""
    if not isinstance(traced_op(call), OpOverload):
        return  # placement.py copies what a pass of ours returns in another layout
    homes: dict[int, int] = {}
    for position, (value, found) in enumerate(zip(call.outputs, results, strict=True)):
        if value is None:
            continue
        if found is None:
            if position in use.needed:
                text = f"result {position} is not made, and the trace has one"
                yield Difference(text, position, learnable=False, sized=True)
        elif (found.dtype, found.size) != (value.dtype, value.size):
            yield Difference(_against(position, found, value), position, sized=True)
        elif 0 in value.size:
            continue
        elif use.rewritten and found.home == given:
            text = f"result {position} lies in an argument, and the trace has it in new memory"
            yield Difference(text, position, learnable=False)
        elif not _laid_out_alike(found, value):
            yield Difference(_against(position, found, value), position)
        elif homes.setdefault(value.buffer, found.home) != found.home:
            yield Difference(f"result {position} has memory of its own", position)
    if use.rewritten and len(set(homes.values())) < len(homes):
        yield Difference("two results share their memory", 0, learnable=False)


class WrongFakes:
    """What is found wrong about the fakes of a graph while its calls are measured in order."""

    def __init__(self, uses: Mapping[Any, Use], device: torch.device) -> None:
        self._uses, self._device = uses, device
        self._first = ""
        self._answers: dict[Any, Answer] = {}
        self._unknown: set[int] = set()
        """Buffers whose true sizes are not known."""

    def __bool__(self) -> bool:
        return bool(self._first)

    def admit(self, key: Any) -> bool:
        """Whether a call may run, because what it is given has the sizes of a real step. What a
        call that may not would make is not known either."""
        use = self._uses[key]
        if self._unknown.isdisjoint(use.reads):
            return True
        for position in range(len(use.makes[0])):
            self._doubt(use, position)
        return False

    def compare(self, key: Any, call: Call, results: Answer, given: int) -> frozenset[int]:
        """Note where results are not what their fakes are. Returns the positions of outputs that
        were not made with the sizes of the trace. cuDNN's attention, for example, returns no sums
        if no backward pass needs them."""
        use, outputs = self._uses[key], call.outputs
        every = (*results, *(None for _ in outputs[len(results) :]))[: len(outputs)]
        absent = {n for n, found in enumerate(every) if found is None and outputs[n] is not None}
        for found in differences(call, every, given, use):
            if found.learnable:
                self._answers[key_of(call, self._device)] = results
            self._first = self._first or f"{use.line}{name(call.op)}: {found.text}"
            if found.sized:
                absent.add(found.position)
                self._doubt(use, found.position)
        return frozenset(absent)

    def _doubt(self, use: Use, position: int) -> None:
        self._unknown.update(v.buffer for made in use.makes if (v := made[position]) is not None)

    def check(self) -> None:
        """Raise an error if a result is not what its fake is."""
        if self._first:
            raise Misjudged(f"{self._first}. {ADVICE}", self._answers)


def _laid_out_alike(found: Result, value: Value) -> bool:
    """A step along a dimension of one element leads nowhere."""
    steps = zip(value.size, found.stride, value.stride, strict=True)
    return all(real == fake for n, real, fake in steps if n > 1)


def _against(position: int, found: Result, value: Value) -> str:
    real, fake = (f"{t.dtype} {t.size} with strides {t.stride}" for t in (found, value))
    return f"result {position} is {real}, and the trace has {fake}"


def _alike(one: Answer, other: Answer | None) -> bool:
    """Whether two answers say the same. Their homes may be elsewhere."""
    return other is not None and _without_homes(one) == _without_homes(other)


def _without_homes(answer: Answer) -> list[Result | None]:
    names: dict[int, int] = {}
    return [r and replace(r, home=names.setdefault(r.home, len(names))) for r in answer]


def corrected(answer: Answer, result: Any) -> Any:
    """The fakes of a call, made anew where they differ from what is learned."""
    homes: dict[int, int] = {}
    told = iter([r for r, fake in zip(answer, flat(result), strict=True) if _is_tensor(fake)])

    def as_told(fake: torch.Tensor) -> torch.Tensor:
        if (found := next(told)) is None:
            return fake
        same = homes.setdefault(storage_key(fake), found.home) == found.home
        alike = (fake.dtype, tuple(fake.size())) == (found.dtype, found.size)
        if same and alike and tuple(fake.stride()) == found.stride:
            return fake
        return torch.empty_strided(found.size, found.stride, dtype=found.dtype, device=fake.device)

    return mapped(result, as_told)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
