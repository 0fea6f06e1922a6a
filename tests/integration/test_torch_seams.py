"""An upgrade of torch that takes a private name away fails here, and names it.

The table has a row for each name of the seams modules of offload and loaders: it is there, and does
what we need of it. What needs CUDA is only looked up. Lightning's: test_lightning_seams.py.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.distributed.fsdp import fully_shard
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


def _held_by_others() -> bool:
    x = torch.ones(4)
    alone = t.is_held_by_others([x])
    view = x[1:]
    foreign = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    both = t.is_held_by_others([x, view]), t.is_held_by_others([foreign, foreign[1:]])
    return t.is_held_by_others([x]) and not alone and both == (False, False)


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


def _one(change: Callable[[list[torch.Tensor]], object], start: float = 2.0) -> float:
    """What a kernel on lists of tensors makes of a list of one."""
    x = torch.full((1,), start)
    change([x])
    return x.item()


def _ones(number: int) -> list[list[torch.Tensor]]:
    return [[torch.ones(1)] for _ in range(number)]


def _adamw_op() -> bool:
    p, g, mean, square, step = _ones(5)
    t.fused_adamw_op(
        p, g, mean, square, [], step, lr=0.5, beta1=0.9, beta2=0.99,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return p[0][0].item() < 1


def _versions() -> bool:
    x = torch.ones(2)
    before = loaders.torch_seams.version_of(x)
    x.add_(1)
    return loaders.torch_seams.version_of(x) == before + 1


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


def _has_a_conversion() -> bool:
    return callable(getattr(torch.nn.Module, t.CONVERSION))


def _has_compiled_graphs() -> bool:
    torch.compile(torch.neg)
    return callable(t.compiled_graphs().__call__)


def _keeps_only_with_autograd() -> bool:
    """The workspace of an LSTM's kernel, in the two modes."""
    given: Any = (torch.ones(1, 1, 2), *torch.nn.LSTM(2, 2).all_weights[0], *torch.zeros(2, 1, 2))
    given += (False, [], 2, 2, 1, True, False, False, True)
    assert {"mkldnn_rnn_layer"} == t.ASKING_AUTOGRAD
    with torch.no_grad():
        without = torch.mkldnn_rnn_layer(*given)[3]
    return torch.mkldnn_rnn_layer(*given)[3].numel() > 0 and without is None


def _generator_by_its_key() -> bool:
    own, default = torch.Generator(), torch.default_generator
    return t.generator_key(own) == t.generator_key(own) != t.generator_key(default)


def _higher_order() -> bool:
    """Every higher-order operator says which keys it does not look past."""
    known = t.higher_order_operators.values()
    return all(
        isinstance(op, t.HigherOrderOperator) and op.non_fallthrough_keys is not None
        for op in known
    ) and bool(known)


TORCH: dict[str, Callable[[], bool]] = {
    "gloo_group": _formed_alone,
    "AllToAllOptions": lambda: trainers.torch_seams.AllToAllOptions() is not None,
    "AllgatherOptions": lambda: trainers.torch_seams.AllgatherOptions() is not None,
    "storage_id": lambda: trainers.torch_seams.storage_id(x := torch.ones(2))
    == trainers.torch_seams.storage_id(x[1:]),
    "pytree": lambda: t.pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2],
    "TorchDispatchMode": lambda: aten.mul.Tensor in _ops(lambda: torch.ones(2) * 2),
    "OpOverload": lambda: isinstance(aten.mm.default, t.OpOverload),
    "to_copy": lambda: t.to_copy in _ops(lambda: torch.ones(2).to(torch.float64)),
    "fused_adamw_op": _adamw_op,
    "set_grad_enabled": _grad_mode,
    "FLAG_SETTERS": lambda: "_set_mkldnn_enabled" in t.FLAG_SETTERS,
    "SETTERS_OF": lambda: all(callable(getattr(t.SETTERS_OF, one)) for one in t.FLAG_SETTERS),
    "FlagProperty": lambda: callable(t.FlagProperty.__set__),
    "set_cudnn_benchmark": _cudnn_benchmark,
    "fp16_reduced_precision": lambda: t.fp16_reduced_precision() == t.fp16_reduced_precision(),
    "bf16_reduced_precision": lambda: t.bf16_reduced_precision() == t.bf16_reduced_precision(),
    "spin": lambda: callable(t.spin),
    "clear_cublas_workspaces": lambda: callable(t.clear_cublas_workspaces),
    "empty_host_cache": lambda: callable(t.empty_host_cache),
    "foreach_lerp_": lambda: _one(lambda x: t.foreach_lerp_(x, [torch.zeros(1)], 0.5)) == 1,
    "schema_of": lambda: t.schema_of(aten.add_.Tensor).is_mutable,
    "name_of": lambda: t.name_of(aten.mm.default) == "mm",
    "version_of": _versions,
    "is_held_by_others": _held_by_others,
    "address_of": lambda: t.address_of(one := torch.ones(2)) == one.data_ptr(),
    "HigherOrderOperator": _higher_order,
    "higher_order_operators": _higher_order,
    "ASKING_AUTOGRAD": _keeps_only_with_autograd,
    "CONVERSION": _has_a_conversion,
    "compiled_graphs": _has_compiled_graphs,
    "generator_key": _generator_by_its_key,
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_torch_has_what_we_need_of_it(name: str) -> None:
    assert TORCH[name]()


def test_torch_says_which_worker_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    loaders.torch_seams.set_worker_info(2, 3, 5, "the data set")
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers, info.seed) == (2, 3, 5)
    assert info.dataset == "the data set"


def test_a_dead_worker_is_noticed_by_who_waits_and_others_end_when_they_are_told() -> None:
    loader = DataLoader(range(40), 2, num_workers=2, persistent_workers=True)
    batches = loaders.torch_seams.take_over_workers(iter(loader))
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


def test_precisions_of_float32_are_read_and_put_back_whichever_way_they_were_set() -> None:
    before = t.float32_precisions()
    try:
        every: Any = torch.backends
        every.cuda.matmul.fp32_precision = "tf32"  # torch's older getters raise from here on
        changed = t.float32_precisions()
        assert changed != before and changed.count("tf32") == before.count("tf32") + 1
        t.set_float32_precisions(before)
        assert t.float32_precisions() == before
    finally:
        t.set_float32_precisions(before)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group, in which this process is alone."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_tensor_that_waits_for_others_has_no_bytes_of_its_own() -> None:
    pending = functional.all_reduce(torch.ones(2), "sum", distributed.group.WORLD)
    assert t.is_wrapper_subclass(pending) and not t.is_wrapper_subclass(torch.ones(2))


@pytest.mark.usefixtures("alone")
def test_fsdp_sets_a_module_up_in_its_first_call() -> None:
    plain, sharded = torch.nn.Linear(2, 2), fully_shard(torch.nn.Linear(2, 2))
    assert [*map(t.is_set_up_by_a_call, (plain, sharded))] == [False, True]
    sharded(torch.ones(1, 2))
    assert not t.is_set_up_by_a_call(sharded)


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
        patched.delattr(torch._C, "_set_grad_enabled")
        with pytest.raises(ImportError) as caught:
            exec(compile(source, "torch_seams.py", "exec"), {"__name__": "again"})
    said = str(caught.value)
    assert torch.__version__ in said and "_set_grad_enabled" in said and t.TESTED in said


def test_a_name_of_cuda_builds_that_is_gone_fails_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    again: dict[str, Any] = {"__name__": "again"}
    exec((ROOT / "offload/torch_seams.py").read_text(), again)
    with pytest.raises(AttributeError, match="_host_emptyCache"):
        again["empty_host_cache"]()


def test_kernels_of_attention_have_results_without_bytes() -> None:
    t.register_shape_functions()
    q = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    flash = t.flash_attention(q, q, q, 0.0, True, False, scale=0.5)[0]
    efficient = t.efficient_attention(q, q, q, None, True, 0.0, True, scale=0.5)[0]
    by_cudnn = t.cudnn_attention(q, q, q, None, True, 0.0, True, scale=0.5)[0]
    assert {made.shape for made in (flash, efficient, by_cudnn)} == {q.shape}


def test_a_kernel_of_ours_is_taken_back() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", lambda q, k, v, *_: q - 1, "AutogradCPU")
    q = torch.ones(1, 1, 2, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    taken = attend(q, q, q)
    t.drop_kernels(library)
    assert taken.eq(0).all() and attend(q, q, q).eq(1).all()


def test_a_tensor_of_numbers_can_be_made_on_the_host_first() -> None:
    t.lift_from_host(True)
    try:
        assert torch.tensor([1.0], device="cpu").tolist() == [1.0]
    finally:
        t.lift_from_host(False)
