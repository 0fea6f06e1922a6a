"""An upgrade of torch that takes a private name away fails here, and names it.

The table has a row for each name of the seams modules of offload and loaders: it is there, and does
what we need of it. What needs CUDA is only looked up. Lightning's: test_lightning_seams.py.
"""

import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader

import loaders.torch_seams
import offload.torch_seams as t
import trainers.torch_seams

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten


class _Seen(t.TorchDispatchMode):
    """Notes the ops that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def _ops(run: Callable[[], object]) -> list[Any]:
    with _Seen() as seen:
        run()
    return seen.ops


def _no_mode() -> bool:
    with _Seen() as seen, t.disable_current_modes():
        torch.ones(2)
    return not seen.ops


def _current_mode() -> bool:
    with _Seen() as seen:
        return t.get_current_dispatch_mode() is seen


def _held_by_others() -> bool:
    x = torch.ones(4)
    alone = t.is_held_by_others([x])
    view = x[1:]
    foreign = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    both = t.is_held_by_others([x, view]), t.is_held_by_others([foreign, foreign[1:]])
    return t.is_held_by_others([x]) and not alone and both == (False, False)


def _fake(*size: int) -> torch.Tensor:
    with t.FakeTensorMode():
        return torch.empty(*size)


def _raises(kind: type[BaseException], run: Callable[[], object]) -> bool:
    with pytest.raises(kind):
        run()
    return True


def _logs_as_it_fails() -> bool:
    """The logger that is silenced while a step is traced is one that torch has."""
    return t.FAKE_LOGGER in logging.root.manager.loggerDict


def _grad_mode() -> bool:
    before = torch.is_grad_enabled()
    try:
        t.set_grad_enabled(False)
        return not torch.is_grad_enabled()
    finally:
        t.set_grad_enabled(before)


def _cudnn_benchmark() -> bool:
    before = torch.backends.cudnn.benchmark
    try:
        t.set_cudnn_benchmark(not before)
        return torch.backends.cudnn.benchmark is not before
    finally:
        t.set_cudnn_benchmark(before)


def _backward_node() -> bool:
    nodes: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: nodes.append(t.current_autograd_node()))
    y.sum().backward()
    return t.current_autograd_node() is None and nodes[0] is not None


def _numbers_of_nodes() -> bool:
    x = torch.ones(2, requires_grad=True)
    before = t.next_sequence_number()
    y = x.mul(2)
    assert y.grad_fn is not None
    return t.next_sequence_number() == before + 1 and t.sequence_number(y.grad_fn) == before


def _one(change: Callable[[list[torch.Tensor]], object], start: float = 2.0) -> float:
    """What a kernel on lists of tensors makes of a list of one."""
    x = torch.full((1,), start)
    change([x])
    return x.item()


def _ones(number: int) -> list[list[torch.Tensor]]:
    return [[torch.ones(1)] for _ in range(number)]


def _adam(kernel: Callable[..., Any]) -> bool:
    p, g, mean, square, step = _ones(5)
    kernel(
        p, g, mean, square, [], step, lr=torch.tensor(0.5), beta1=0.9, beta2=0.99,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return p[0][0].item() < 1


def _adamw_op() -> bool:
    p, g, mean, square, step = _ones(5)
    t.fused_adamw_op(
        p, g, mean, square, [], step, lr=0.5, beta1=0.9, beta2=0.99,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return p[0][0].item() < 1


def _sgd() -> bool:
    [p], [g] = _ones(2)
    t.fused_sgd_(
        [p], [g], [], weight_decay=0.0, momentum=0.0, lr=torch.tensor(0.5, dtype=torch.float64),
        dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
    return p[0].item() == 0.5


def _groups() -> bool:
    tensors = [torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1)]
    groups = t.group_by_device_and_dtype([[*tensors]], with_indices=True)
    return sorted(numbers for _, numbers in groups.values()) == [[0, 2], [1]]


def _stand_in() -> bool:
    storage = t.storage_at(4096, torch.device("cpu"), 8)
    return storage.nbytes() == 8 and storage.data_ptr() == 4096


def _shared_key() -> bool:
    x, fake = torch.ones(4), _fake(4)
    same = t.storage_key(x) == t.storage_key(x[1:]) and t.storage_key(fake) == t.storage_key(
        fake[1:]
    )
    return same and t.storage_key(x) != t.storage_key(fake)


def _versions() -> bool:
    x = torch.ones(2)
    before = t.version_of(x)
    x.add_(1)
    return t.version_of(x) == before + 1


def _hooked() -> bool:
    p = torch.nn.Parameter(torch.ones(1))
    empty = t.gradient_hooks(p) == {} and not t.has_gradient_end_hooks(p)
    p.register_hook(abs)
    p.register_post_accumulate_grad_hook(lambda p: None)
    keys = tuple(t.gradient_hooks(p))
    alike = t.hook_keys([p, torch.ones(1)]) == (keys, ()) and len(keys) == 1
    named = [*t.gradient_hooks(p).values()] == [abs]
    return empty and alike and named and t.has_gradient_end_hooks(p)


def _fused_says_so() -> bool:
    p = [torch.nn.Parameter(torch.ones(1))]
    return t.is_fused(torch.optim.Adam(p, fused=True)) and not t.is_fused(torch.optim.Adam(p))


def _left_alone() -> bool:
    """The name that torch's own setter writes."""
    module = torch.nn.Linear(1, 1)
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    return [*t.left_to_each_rank(module)] == ["weight"]


def _held() -> bool:
    own = vars(torch.nn.BatchNorm1d(2))
    return {*t.HELD} <= own.keys() and t.CHILDREN in t.HELD


def _names_of_attention(names: frozenset[str]) -> bool:
    return all(hasattr(aten, name) for name in names)


def _called_after_backward() -> bool:
    x, said = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda g: t.at_end_of_backward(lambda: said.append(x.grad)))
    (x * 2).backward()
    return said == [x.grad]


PLAIN = loaders.torch_seams.plain_results


def _formed_alone() -> bool:
    """A group of gloo's with one member, which forms at once and adds up."""
    ends = timedelta(seconds=5)
    host = "127.0.0.1"
    group = trainers.torch_seams.gloo_group(
        distributed.HashStore(), 0, 1, host, forming=ends, operation=ends
    )
    ones = torch.ones(3)
    group.allreduce([ones]).wait()
    return group.size() == 1 and ones.tolist() == [1.0, 1.0, 1.0]


TORCH: dict[str, Callable[[], bool]] = {
    "gloo_group": _formed_alone,
    "AllToAllOptions": lambda: trainers.torch_seams.AllToAllOptions() is not None,
    "AllgatherOptions": lambda: trainers.torch_seams.AllgatherOptions() is not None,
    "storage_id": lambda: trainers.torch_seams.storage_id(x := torch.ones(2))
    == trainers.torch_seams.storage_id(x[1:]),
    "pytree": lambda: t.pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2],
    "TorchDispatchMode": lambda: aten.mul.Tensor in _ops(lambda: torch.ones(2) * 2),
    "disable_current_modes": _no_mode,
    "get_current_dispatch_mode": _current_mode,
    "FakeTensor": lambda: isinstance(_fake(2), t.FakeTensor),
    "FakeTensorMode": lambda: _fake(1 << 40).untyped_storage().nbytes() == 1 << 42,
    "DataDependentOutputException": lambda: _raises(
        t.DataDependentOutputException, lambda: _fake(1).item()
    ),
    "DynamicOutputShapeException": lambda: _raises(
        t.DynamicOutputShapeException, lambda: _fake(4).nonzero()
    ),
    "FAKE_LOGGER": _logs_as_it_fails,
    "OpOverload": lambda: isinstance(aten.mm.default, t.OpOverload),
    "item": lambda: t.item in _ops(lambda: torch.ones(()).item()),
    "index_put_impl_": lambda: t.schema_of(t.index_put_impl_).name == "aten::_index_put_impl_",
    "to_copy": lambda: t.to_copy in _ops(lambda: torch.ones(2).to(torch.float64)),
    "TO_COPY": lambda: t.schema_of(t.to_copy).name == f"aten::{t.TO_COPY}",
    "softmax": lambda: t.softmax in _ops(lambda: torch.ones(2).softmax(0)),
    "softmax_backward": lambda: t.softmax_backward in _ops(
        lambda: torch.ones(2, requires_grad=True).softmax(0)[0].backward()
    ),
    "log_softmax": lambda: t.log_softmax in _ops(lambda: torch.ones(2).log_softmax(0)),
    "log_softmax_backward": lambda: t.log_softmax_backward in _ops(
        lambda: torch.ones(2, requires_grad=True).log_softmax(0)[0].backward()
    ),
    "fused_adamw_op": _adamw_op,
    "set_grad_enabled": _grad_mode,
    "current_autograd_node": _backward_node,
    "next_sequence_number": _numbers_of_nodes,
    "sequence_number": lambda: t.sequence_number(object()) == -1,
    "storage_at": _stand_in,
    "set_cudnn_benchmark": _cudnn_benchmark,
    "fp16_reduced_precision": lambda: t.fp16_reduced_precision() == t.fp16_reduced_precision(),
    "bf16_reduced_precision": lambda: t.bf16_reduced_precision() == t.bf16_reduced_precision(),
    "spin": lambda: callable(t.spin),
    "clear_cublas_workspaces": lambda: callable(t.clear_cublas_workspaces),
    "empty_host_cache": lambda: callable(t.empty_host_cache),
    "cuda_tensor_over": lambda: callable(t.cuda_tensor_over),
    "foreach_add_": lambda: _one(lambda x: t.foreach_add_(x, 1)) == 3,
    "foreach_addcmul_": lambda: _one(lambda x: t.foreach_addcmul_(x, *_ones(2), 0.5)) == 2.5,
    "foreach_clamp_max_": lambda: _one(lambda x: t.foreach_clamp_max_(x, 1.0)) == 1,
    "foreach_clamp_min_": lambda: _one(lambda x: t.foreach_clamp_min_(x, 3.0)) == 3,
    "foreach_copy_": lambda: _one(lambda x: t.foreach_copy_(x, [torch.full((1,), 7.0)])) == 7,
    "foreach_lerp_": lambda: _one(lambda x: t.foreach_lerp_(x, [torch.zeros(1)], 0.5)) == 1,
    "foreach_mul_": lambda: _one(lambda x: t.foreach_mul_(x, torch.tensor(4.0))) == 8,
    "foreach_norm": lambda: t.foreach_norm([torch.tensor([3.0, 4.0])], 2.0)[0].item() == 5,
    "fused_adam_": lambda: _adam(t.fused_adam_),
    "fused_adamw_": lambda: _adam(t.fused_adamw_),
    "fused_sgd_": _sgd,
    "group_by_device_and_dtype": _groups,
    "BatchNorm": lambda: issubclass(torch.nn.BatchNorm2d, t.BatchNorm),
    "default_group": lambda: _raises(ValueError, t.default_group),  # no process group was made
    "default_store": lambda: _raises(ValueError, t.default_store),
    "at_end_of_backward": _called_after_backward,
    "SEEDED_FORWARD": lambda: _names_of_attention(t.SEEDED_FORWARD),
    "SEEDED_BACKWARD": lambda: _names_of_attention(t.SEEDED_BACKWARD),
    "CHILDREN": lambda: t.CHILDREN in vars(torch.nn.Linear(1, 1)),
    "HELD": _held,
    "schema_of": lambda: t.schema_of(aten.add_.Tensor).is_mutable,
    "packet_of": lambda: t.packet_of(aten.mm.default) is aten.mm,
    "name_of": lambda: t.name_of(aten.mm.default) == "mm",
    "storage_key": _shared_key,
    "is_held_by_others": _held_by_others,
    "version_of": _versions,
    "gradient_hooks": _hooked,
    "hook_keys": _hooked,
    "has_gradient_end_hooks": _hooked,
    "is_fused": _fused_says_so,
    "left_to_each_rank": _left_alone,
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_torch_has_what_we_need_of_it(name: str) -> None:
    assert TORCH[name]()


def test_torch_says_which_worker_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    loaders.torch_seams.tell_worker_info(2, 3, 5, "the data set")
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers, info.seed) == (2, 3, 5)
    assert info.dataset == "the data set"


def test_a_dead_worker_is_noticed_by_who_waits_and_others_end_when_they_are_told() -> None:
    loader = DataLoader(range(40), 2, num_workers=2, persistent_workers=True)
    batches = loaders.torch_seams.deaths_seen_late(iter(loader))
    next(batches)
    first, second = multiprocessing.active_children()
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join()  # an error of torch's would be raised here, in the main thread
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid"):
        deque(batches, maxlen=0)
    loaders.torch_seams.end_workers(loader)
    assert not second.is_alive()


def test_what_is_made_of_a_picture_is_a_plain_tensor() -> None:
    class Own(torch.Tensor):
        __torch_function__ = PLAIN  # type: ignore[assignment]

    assert type(torch.ones(2).as_subclass(Own) * 2) is torch.Tensor


# ---- where one is gone --------------------------------------------------------------------------


def test_an_attribute_that_is_gone_is_named_with_the_version() -> None:
    op = SimpleNamespace()
    with pytest.raises(AttributeError) as caught:
        t.schema_of(op)
    said = str(caught.value)
    assert torch.__version__ in said and t.TESTED in said and "no attribute '_schema'" in said


def test_a_name_of_a_module_that_is_gone_fails_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / "offload/torch_seams.py").read_text()
    with monkeypatch.context() as patched:
        patched.delattr(torch._C, "_current_autograd_node")
        with pytest.raises(ImportError) as caught:
            exec(compile(source, "torch_seams.py", "exec"), {"__name__": "again"})
    said = str(caught.value)
    assert torch.__version__ in said and "_current_autograd_node" in said and t.TESTED in said


def test_a_name_of_cuda_builds_that_is_gone_fails_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    again: dict[str, Any] = {"__name__": "again"}
    exec((ROOT / "offload/torch_seams.py").read_text(), again)
    with pytest.raises(AttributeError, match="_host_emptyCache"):
        again["empty_host_cache"]()
