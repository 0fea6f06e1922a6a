"""The ways to a tensor's bytes, and to random numbers, that pass the dispatcher by.

t.numpy()  t.tolist()  pickle                       what makes the bytes runs first
torch.backends.mkldnn.enabled = False               what was issued before it runs first
copy.deepcopy(t)                                    so, too, or it is an operation: a clone
torch.get_rng_state()  torch.manual_seed(0)         what draws runs first
net.to(torch.double)                                a gradient that was dropped stays so
torch.tensor([t, t])  torch.ctc_loss(.., lengths)   what makes the numbers runs first
a kernel of torch.compile                           runs at once, or raises if there is a budget

They are patched while any session is open, and each call goes to the session of its thread. In a
thread without one the original runs, or an error says that the bytes are another's.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from offload.errors import OffloadError
from offload.torch_seams import (
    CONVERSION,
    FLAG_SETTERS,
    SETTERS_OF,
    FlagProperty,
    HigherOrderOperator,
    compiled_graphs,
    higher_order_operators,
)

READERS = (
    "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__",
)  # fmt: skip
ARRAYS = ("numpy", "__array__")
"""Methods after which numpy can read and write the bytes, until their result is dropped."""
EXPOSERS = ("__dlpack__", "share_memory_")
"""Methods after which somebody can do so for good."""
_OF_CPU = ("get_rng_state", "set_rng_state", "manual_seed", "seed")
_OF_CUDA = (*_OF_CPU, "get_rng_state_all", "set_rng_state_all", "manual_seed_all", "seed_all")
FLAGS = ((torch, ("set_num_threads", "set_flush_denormal")), (SETTERS_OF, FLAG_SETTERS))
"""Functions that set what all kernels depend on."""
AT_ONCE = ((torch, ("ctc_loss", "save")), (torch.serialization, ("save",)))
"""Functions that read lengths or storages by address."""
GENERATORS = (
    (torch, _OF_CPU),
    (torch.random, _OF_CPU),
    (torch.cuda, _OF_CUDA),
    (torch.cuda.random, _OF_CUDA),
)
"""Functions that read or set the state that kernels draw from."""
UNSEEN = tuple((owner, ("quantile", "nanquantile")) for owner in (torch, torch.Tensor))
"""Functions made of several operations, which read the results of some by address."""
OF_LISTS = ((torch, ("tensor", "as_tensor", "asarray")), (torch.Tensor, ("new_tensor",)))
"""Functions that make a tensor of numbers, which may be tensors themselves."""


class Entrances:
    """The entrances of this process, for all of its sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._patches = ExitStack()

    @contextmanager
    def watch(self, core: Any) -> Iterator[None]:
        """Within it, whoever reads a tensor's bytes by another way waits for them."""
        with self._lock:
            if self._users == 0:
                self._patches.enter_context(_patch_all(core))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._patches.close()


ENTRANCES = Entrances()


@contextmanager
def _patch_all(core: Any) -> Iterator[None]:
    storage_of = torch.Tensor.untyped_storage  # before it is replaced
    with ExitStack() as patches:
        for names, visit in ((READERS, core.touch), (EXPOSERS, partial(_expose, core))):
            for name in names:
                method = _visit_first(getattr(torch.Tensor, name), visit)
                patches.enter_context(_replace(torch.Tensor, name, method))
        deepcopy = _wrap_deepcopy(core, torch.Tensor.__deepcopy__, storage_of)
        patches.enter_context(_replace(torch.Tensor, "__deepcopy__", deepcopy))
        for name in ARRAYS:
            method = _wrap_array_method(getattr(torch.Tensor, name), core)
            patches.enter_context(_replace(torch.Tensor, name, method))
        for owner, names in (*FLAGS, (FlagProperty, ("__set__",))):
            for name in names:
                setter = _set_late(core, getattr(owner, name))
                patches.enter_context(_replace(owner, name, setter))
        for functions, settle in ((AT_ONCE, core.settle), (GENERATORS, core.settle_draws)):
            for module, names in functions:
                for name in names:
                    function = _settle_first(core, getattr(module, name), settle)
                    patches.enter_context(_replace(module, name, function))
        for owner, names in UNSEEN:
            for name in names:
                function = _run_unseen(core, getattr(owner, name))
                patches.enter_context(_replace(owner, name, function))
        for owner, names in OF_LISTS:
            for name in names:
                maker = _touch_lists_first(core, getattr(owner, name))
                patches.enter_context(_replace(owner, name, maker))
        # FSDP frees the bytes of a weight, and makes them anew.
        resize = _visit_first(torch.UntypedStorage.resize_, core.expose_storage)
        patches.enter_context(_replace(torch.UntypedStorage, "resize_", resize))
        if (compiled := compiled_graphs()) is not None:
            call = _wrap_compiled(core, compiled.__call__)
            patches.enter_context(_replace(compiled, "__call__", call))
        apply = _wrap_conversion(core, getattr(torch.nn.Module, CONVERSION))
        patches.enter_context(_replace(torch.nn.Module, CONVERSION, apply))
        patches.enter_context(_patch_higher_order(core))
        yield


@contextmanager
def _replace(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _visit_first(method: Callable[..., Any], visit: Callable[[Any], None]) -> Callable[..., Any]:
    def visit_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        visit(self)
        return method(self, *args, **kwargs)

    return visit_and_call


def _wrap_deepcopy(core: Any, method: Callable[..., Any], storage_of: Any) -> Callable[..., Any]:
    """The deep copy of a tensor. It is a clone if the tensor has a memory block for itself."""

    def deepcopy(self: Any, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if type(self) is not torch.Tensor or self.layout is not torch.strided:
            core.touch(self)
            return method(self, memo)
        known, identity = memo.setdefault("torch", {}), core.identity(self)
        if (
            core.is_in_step()
            and identity not in known
            and self.nbytes == storage_of(self).nbytes()
            and self.is_contiguous()
            and not (self.requires_grad or self.is_inference() or self.__dict__)
            and not (self.is_conj() or self.is_neg())
        ):
            made = memo[id(self)] = memo[deepcopy, identity] = self.clone()
            known[identity] = storage_of(made)
            return made
        core.touch(self)
        if (made := memo.get((deepcopy, identity))) is not None:
            core.touch(made)  # the new one shares its memory
        was_on = core.set_key(False)
        try:
            return method(self, memo)
        finally:
            core.set_key(was_on)

    return deepcopy


def _expose(core: Any, tensor: torch.Tensor) -> None:
    core.expose(tensor, False)


def _wrap_array_method(method: Callable[..., Any], core: Any) -> Callable[..., Any]:
    def make_array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        session = core.expose(self, True)
        if session is None:
            return method(self, *args, **kwargs)
        storage = core.identity(self)
        try:
            array = method(self, *args, **kwargs)
        except BaseException:
            session.conceal(storage)
            raise
        weakref.finalize(array, session.conceal, storage).atexit = False
        return array

    return make_array


def _settle_first(
    core: Any, function: Callable[..., Any], settle: Callable[[], object]
) -> Callable[..., Any]:
    """The function, after what it needs of all that was issued before it."""

    def settle_and_call(*args: Any, **kwargs: Any) -> Any:
        settle()
        for tensor in _tensors_in((*args, *kwargs.values())):
            core.touch(tensor)
        return function(*args, **kwargs)

    return settle_and_call


def _set_late(core: Any, setter: Callable[..., Any]) -> Callable[..., Any]:
    """The setter, after all that was issued before it. If that fails, the first setter of a
    step does not run, but the others do: they may restore a flag."""

    def set_late(*args: Any, **kwargs: Any) -> Any:
        is_first = core.sets_first_flag()
        try:
            core.settle()
        except BaseException:
            if not is_first:
                setter(*args, **kwargs)
            raise
        return setter(*args, **kwargs)

    return set_late


def _wrap_compiled(core: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of kernels that take addresses."""
    run = _run_unseen(core, call)

    def run_compiled(self: Any, inputs: Any) -> Any:
        if core.has_budget():
            raise OffloadError(
                "torch.compile made a part of this step, and its kernels keep no budget: train with"
                " budget=None, or without torch.compile"
            )
        return run(self, inputs)

    return run_compiled


def _wrap_conversion(core: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """The conversion of a module, which converts gradients too. Those without bytes stay so."""

    def apply_to(module: torch.nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def convert(given: torch.Tensor) -> torch.Tensor:
            if not core.is_lost(given):
                return fn(given)
            like = {"dtype": given.dtype, "device": given.device}
            made = fn(torch.empty_strided(given.size(), given.stride(), **like))
            core.drop(made)
            return made

        return apply(module, convert, *args, **kwargs)

    return apply_to


def _run_unseen(core: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after all that was issued before it, as it runs without a session."""

    def call_unseen(*args: Any, **kwargs: Any) -> Any:
        core.settle()
        for tensor in _tensors_in((*args, *kwargs.values())):
            core.touch(tensor)
        was_on = core.set_key(False)
        try:
            return function(*args, **kwargs)
        finally:
            core.set_key(was_on)

    return call_unseen


def _touch_lists_first(core: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after what makes the tensors in the lists that it is given."""

    def touch_and_call(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, list | tuple):
                for tensor in _tensors_in(given):
                    core.touch(tensor)
        return function(*args, **kwargs)

    return touch_and_call


def _tensors_in(given: list[Any] | tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


@contextmanager
def _patch_higher_order(core: Any) -> Iterator[None]:
    """Higher-order operators choose their key in Python, whose enumeration does not have ours. They
    look past it, and their bodies do not."""
    initialize = HigherOrderOperator.__init__
    changed: list[tuple[Any, Any]] = []

    def look_past(op: Any) -> None:
        changed.append((op, op.non_fallthrough_keys))
        op.non_fallthrough_keys = core.without_key(op.non_fallthrough_keys)

    def initialize_past(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        look_past(self)

    for op in [*higher_order_operators.values()]:
        look_past(op)
    try:
        with _replace(HigherOrderOperator, "__init__", initialize_past):
            yield
    finally:
        for op, keys in reversed(changed):
            op.non_fallthrough_keys = keys
