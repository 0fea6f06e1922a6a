"""Every private name of torch that offload and trainers use, and no other file has one.

Each name stands with one line: what it is, and why no public name will do. All were seen in torch
2.11 and in 2.15, but for those that say otherwise. A version of torch that has lost one fails here:

    a name of a module           importing this file raises an ImportError that names it
    an attribute of an object    the first use raises an AttributeError that names it
    a name of CUDA builds        so does the first call; other builds of torch never call it

`tests/integration/test_torch_seams.py` touches each of them once. Functions are bound at import, so
that a call costs what torch's own name costs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.optim import Optimizer

TESTED = "torch>=2.11,<2.16"


def _gone(what: str) -> str:
    return (
        f"torch {torch.__version__}: {what}. offload needs it (offload/torch_seams.py) and was"
        f" tested with {TESTED}: install such a version"
    )


def _of(thing: Any, name: str) -> Any:
    """An attribute of an object of torch's."""
    try:
        return getattr(thing, name)
    except AttributeError as error:
        raise AttributeError(_gone(str(error)), name=name, obj=thing) from None


def _of_cuda_builds(name: str) -> Callable[..., Any]:
    def missing(*_: Any) -> Any:
        raise AttributeError(_gone(f"there is no torch._C.{name}"))

    return getattr(torch._C, name, missing)


try:
    from torch._subclasses import fake_tensor
    from torch.distributed import utils as _ranks
    from torch.utils import _foreach_utils, _python_dispatch
    from torch.utils import _pytree as pytree  # noqa: F401

    # `pytree`, above: lists, tuples and dicts taken apart. torch.compile's own are these; the
    # public `optree` knows other classes.

    # ---- higher-order operators, which choose a dispatch key in Python --------------------------
    HigherOrderOperator: Any = torch._ops.HigherOrderOperator
    higher_order_operators: Any = torch._ops._higher_order_ops

    # `torch.Tensor.data_ptr`, which a live session replaces: it asks for bytes, and homes do not.
    address_of = torch._C.TensorBase.data_ptr

    # ---- modes and fakes ------------------------------------------------------------------------
    # Sees every op of a step. The class is documented; the module that it is in is private.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    # Real kernels in the middle of a trace. Nothing public leaves all the modes at once.
    disable_current_modes = _python_dispatch._disable_current_modes
    # The innermost mode: code deep in a step finds the recorder of its trace.
    get_current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
    # Tensors without memory that keep their device, which "meta" tensors do not.
    FakeTensor = fake_tensor.FakeTensor
    # Makes them. torch.export, which is public, gives no access to it.
    FakeTensorMode = fake_tensor.FakeTensorMode
    # Whether a tensor only stands for others (DTensor): no public function knows all such classes.
    is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
    # What a fake raises where a step asks it for its value.
    DataDependentOutputException = fake_tensor.DataDependentOutputException
    # What a fake raises where a result's size depends on values.
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException

    # ---- ops ------------------------------------------------------------------------------------
    # The class of `torch.ops.aten.mm.default`: there is no public name of it.
    OpOverload = torch._ops.OpOverload
    # Ops that appear in traces under these names. They have no other.
    to_copy = torch.ops.aten._to_copy.default
    item = torch.ops.aten._local_scalar_dense.default
    index_put_impl_ = torch.ops.aten._index_put_impl_.default
    softmax = torch.ops.aten._softmax.default
    softmax_backward = torch.ops.aten._softmax_backward_data.default
    log_softmax = torch.ops.aten._log_softmax.default
    log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
    # The kernel of AdamW(fused=True), without an optimizer around it: to time one update.
    fused_adamw_op = torch.ops.aten._fused_adamw_.default

    # Waits for the result of a collective that returns at once. Its public caller waits when the
    # result is looked at, which no plan can see.
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default

    # ---- autograd -------------------------------------------------------------------------------
    # What `torch.no_grad()` calls; a plain call in C, which a Ctrl-C cannot cut in two.
    set_grad_enabled = torch._C._set_grad_enabled
    # Whether an op is run by the backward pass, and by which node.
    current_autograd_node = torch._C._current_autograd_node
    # Has a function called at the end of the backward pass that runs, as torch's DDP does.
    at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
    # The number of the next node: the forward op before it has the one below.
    next_sequence_number = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]

    # ---- storages -------------------------------------------------------------------------------
    # A storage at an address that is never read: a stand-in that takes no memory.
    storage_at = torch._C._construct_storage_from_data_pointer

    # ---- modes of libraries ---------------------------------------------------------------------
    # `torch.backends.cudnn.benchmark = x` is Python, which a Ctrl-C can cut in two.
    set_cudnn_benchmark = torch._C._set_cudnn_benchmark
    # Two flags each. A public property answers for one of them, and a captured graph keeps both.
    fp16_reduced_precision = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
    bf16_reduced_precision = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    # A kernel that only lasts: timing, and tests that need a slow stream.
    spin = torch.cuda._sleep

    # ---- kernels on lists of tensors ------------------------------------------------------------
    # torch.optim and clip_grad_norm_ are made of them; whoever wants their bits calls them too.
    foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    foreach_addcmul_ = torch._foreach_addcmul_  # pyright: ignore[reportPrivateImportUsage]
    foreach_clamp_max_ = torch._foreach_clamp_max_  # pyright: ignore[reportPrivateImportUsage]
    foreach_clamp_min_ = torch._foreach_clamp_min_  # pyright: ignore[reportPrivateImportUsage]
    foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    foreach_lerp_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
    foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
    foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    # torch.optim's fused=True: one kernel for a group, with the rate as a tensor.
    fused_adam_: Any = torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]
    fused_adamw_: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
    fused_sgd_: Any = torch._fused_sgd_  # pyright: ignore[reportPrivateImportUsage]
    # The order in which clip_grad_norm_ adds up norms, which decides their last bits.
    group_by_device_and_dtype = _foreach_utils._group_tensors_by_device_and_dtype

    # ---- modules and ranks ----------------------------------------------------------------------
    # Whatever normalises by the batch, a user's own class too.
    BatchNorm = torch.nn.modules.batchnorm._BatchNorm
    # The three that DDP's constructor and forward call before its reducer comes in.
    sync_module_states = _ranks._sync_module_states
    sync_params_and_buffers = _ranks._sync_params_and_buffers
    verify_param_shapes = _ranks._verify_param_shape_across_processes
    # Those three want a group, and None does not do for "all ranks".
    default_group = distributed.distributed_c10d._get_default_group
    # What the ranks write to each other without a collective.
    default_store = distributed.distributed_c10d._get_default_store
except (ImportError, AttributeError) as error:
    raise ImportError(_gone(str(error))) from error

# ---- CUDA builds --------------------------------------------------------------------------------

# Frees what cuBLAS keeps for each thread and stream. No public function does.
clear_cublas_workspaces = _of_cuda_builds("_cuda_clearCublasWorkspaces")
# Gives pinned memory back to the system: the twin of torch.cuda.empty_cache() for the host.
empty_host_cache = _of_cuda_builds("_host_emptyCache")
# A CUDA tensor over a storage that is there already: `set_` refuses one of another device.
cuda_tensor_over = _of_cuda_builds("_construct_CUDA_Tensor_From_Storage_And_Metadata")

# ---- names as text ------------------------------------------------------------------------------

# The logger of fakes: it prints each failure that is raised as well.
FAKE_LOGGER = "torch._subclasses.fake_tensor"
# What `.to()` is called in a trace.
TO_COPY = "_to_copy"
# Attention whose dropout has its seed on the CPU.
SEEDED_FORWARD = frozenset(
    {"_scaled_dot_product_efficient_attention", "_efficient_attention_forward"}
)
SEEDED_BACKWARD = frozenset(
    {"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"}
)
# Ops that keep something for their backward only where autograd is on while the kernel runs.
ASKING_AUTOGRAD = frozenset({"mkldnn_rnn_layer"})
# Where a module's `__dict__` has its children, and all that is not a plain attribute.
CHILDREN = "_modules"
HELD = ("_parameters", "_buffers", CHILDREN)
# The hooks of all modules: `register_module_forward_hook` and the like add to these dicts.
_hooks = vars(torch.nn.modules.module)
GLOBAL_HOOKS = tuple(
    _hooks[name]
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)

# ---- attributes of objects ----------------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """Arguments and results of an op: which are written, which are views."""
    return _of(op, "_schema")


def packet_of(op: Any) -> Any:
    """`aten.mm` of `aten.mm.default`: the table of FLOPs goes by it."""
    return _of(op, "_overloadpacket")


def name_of(op: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return _of(op, "_opname")


def pending_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor within one that waits for a collective when it is looked at; None for others."""
    from torch.distributed import _functional_collectives as functional  # only ranks need it

    return tensor.elem if isinstance(tensor, functional.AsyncCollectiveTensor) else None


def finished_work() -> Any:
    """What an op of `torch.distributed` returns in a trace, where nothing is sent."""
    return _of(torch._C, "_distributed_c10d").FakeWork().boxed()


def wait_for_work(work: Any) -> None:
    """Wait for what an op of `torch.distributed` returned to the dispatcher."""
    distributed.Work.unbox(work).wait()  # pyright: ignore[reportPrivateImportUsage]


def group_or_reduction(thing: Any) -> str:
    """Name a process group, or a kind of reduction, that an op of the dispatcher is given."""
    kind = str(_of(thing, "_type")())
    if kind.endswith("ProcessGroup"):
        return f"group {distributed.ProcessGroup.unbox(thing).group_name}"
    return f"reduction {thing.op()}" if kind.endswith("ReduceOp") else kind


def storage_key(tensor: torch.Tensor) -> int:
    """One number a storage, for fakes too, whose `data_ptr()` raises."""
    return _of(tensor.untyped_storage(), "_cdata")


def is_held_by_others(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of the first of these tensors is held by anything but them. Memory that
    no allocator of PyTorch's has made counts as nobody's."""
    storage = tensors[0].untyped_storage()
    if not storage.resizable():
        return False
    mine = sum(each.untyped_storage().data_ptr() == storage.data_ptr() for each in tensors)
    holders = _of(torch._C, "_storage_Use_Count")(_of(storage, "_cdata"))
    return holders > mine + 1  # `storage` is one


def generator_key(generator: torch.Generator) -> int:
    """One number a generator: an op gets another object for the same generator."""
    return _of(generator, "_cdata")


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return _of(tensor, "_version")


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """What `register_hook` was given. torch has no list of them."""
    return _of(tensor, "_backward_hooks") or {}


def hook_keys(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Of each tensor the keys of its gradient hooks: in one call, because every step asks."""
    try:
        return tuple([tuple(tensor._backward_hooks or ()) for tensor in tensors])
    except AttributeError as error:
        raise AttributeError(_gone(str(error))) from None


def has_gradient_end_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called. A tensor without one may lack the
    attribute."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def sequence_number(node: Any) -> int:
    """The number of a node of autograd's graph; -1: nodes of this kind have none."""
    number: Any = getattr(node, "_sequence_nr", None)
    return number() if number else -1


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile made it, so that it has the user's module as `_orig_mod`, or whether
    `module.compile()` was called."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or hasattr(module, "_orig_mod")


def compiled_graphs() -> Any:
    """The class of what Inductor makes, whose calls run its kernels; None before `torch.compile`
    was called. The kernels take addresses, and nothing public is between them and their caller."""
    module = sys.modules.get("torch._inductor.output_code")
    return None if module is None else _of(module, "CompiledFxGraph")


CONVERSION = "_apply"  # of a Module: `to()` and `half()` call it, and no hook sees gradients there


@contextmanager
def compiled_calls(seen: Callable[[], None]) -> Iterator[None]:
    """Call `seen()` whenever something is called that torch.compile made and nobody disabled.
    Every such call asks this function of Dynamo's what to do; no public one tells."""
    frames: Any = _of(_of(torch, "_dynamo"), "eval_frame")
    chosen = _of(frames, "_callback_from_stance")

    def _asked(callback: Any) -> Any:
        if (choice := chosen(callback)) is not None:
            seen()
        return choice

    frames._callback_from_stance = _asked
    try:
        yield
    finally:
        frames._callback_from_stance = chosen


def counts_steps(step: Any) -> bool:
    """Whether a learning rate schedule has wrapped this `optimizer.step`, to count its calls."""
    return getattr(step, "_wrapped_by_lr_sched", False)


LAST_RATES = "_last_lr"
# Where a learning rate schedule keeps what `get_last_lr()` returns; there is no setter.


def swap_last_rates(schedule: Any, rates: list[Any]) -> list[Any]:
    """Set what `get_last_lr()` returns, and return what it was."""
    before = _of(schedule, LAST_RATES)
    setattr(schedule, LAST_RATES, rates)
    return before


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is called around `optimizer.step()`."""
    before = _of(optimizer, "_optimizer_step_pre_hooks")
    return bool(before or _of(optimizer, "_optimizer_step_post_hooks"))


def without_step_hooks(step: Any) -> Any:
    """`Optimizer.__init__` wraps the `step` of its class once, to call hooks and the profiler."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# What `step` of torch's optimizers sets on the optimizer for itself.
OF_STEPS = frozenset(
    {"_need_device_dtype_check_for_fused", "_opt_called", "_warned_capturable_if_run_uncaptured"}
)


def mark_stepped(optimizer: Optimizer) -> None:
    """As `optimizer.step()` does: learning rate schedules warn where nobody has called it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_fused(optimizer: Optimizer) -> bool:
    """Whether a GradScaler leaves the unscaling to it. Only some optimizers say so."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def computed_by_hooks(attributes: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a module with these attributes: each name that a hook before its forward pass sets, and
    the module of torch that made the hook (old weight_norm and spectral_norm, pruning)."""
    return [
        (getattr(hook, "_tensor_name", getattr(hook, "name", "")), type(hook).__module__)
        for hook in attributes.get("_forward_pre_hooks", {}).values()
    ]


def left_to_each_rank(module: torch.nn.Module) -> Any:
    """Names of tensors that DDP is to leave alone, where a user has set some."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", None)


def float32_precisions() -> tuple[str, ...]:
    """How exactly each library computes with float32. It can be read in whichever way the user set
    it, unlike `torch.get_float32_matmul_precision()` and `allow_tf32`."""
    return tuple(owner.fp32_precision for owner in _float32_owners())


def set_float32_precisions(wanted: Sequence[str]) -> None:
    """Set what `float32_precisions` read."""
    for owner, precision in zip(_float32_owners(), wanted, strict=True):
        if owner.fp32_precision != precision:
            owner.fp32_precision = precision


def _float32_owners() -> Sequence[Any]:
    """What has such a setting. Those that others follow come first."""
    every: Any = torch.backends
    cudnn, mkldnn = every.cudnn, every.mkldnn
    return (
        every, cudnn, mkldnn, every.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv,
        mkldnn.rnn,
    )  # fmt: skip
