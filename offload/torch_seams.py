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
from collections.abc import Callable, Sequence
from typing import Any

import torch

TESTED = "torch>=2.11,<2.16"


def _describe_missing(what: str) -> str:
    return (
        f"torch {torch.__version__}: {what}. offload needs it (offload/torch_seams.py) and was"
        f" tested with {TESTED}: install such a version"
    )


def _attribute(thing: Any, name: str) -> Any:
    """An attribute of an object of torch's."""
    try:
        return getattr(thing, name)
    except AttributeError as error:
        raise AttributeError(_describe_missing(str(error)), name=name, obj=thing) from None


def _of_cuda_builds(name: str) -> Callable[..., Any]:
    def raise_missing(*_: Any) -> Any:
        raise AttributeError(_describe_missing(f"there is no torch._C.{name}"))

    return getattr(torch._C, name, raise_missing)


try:
    from torch.utils import _python_dispatch
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
    # Whether a tensor only stands for others (DTensor): no public function knows all such classes.
    is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

    # ---- ops ------------------------------------------------------------------------------------
    # The class of `torch.ops.aten.mm.default`: there is no public name of it.
    OpOverload = torch._ops.OpOverload
    # What `.to()` calls. It has no other name.
    to_copy = torch.ops.aten._to_copy.default
    # The kernel of AdamW(fused=True), without an optimizer around it: to time one update.
    fused_adamw_op = torch.ops.aten._fused_adamw_.default

    # Have `torch.tensor` make a tensor on the host, and copy it by an operation that can be seen.
    lift_from_host = torch._C._set_only_lift_cpu_tensors
    # What attention runs on a card. Its public function asks the driver, and a card may be absent.
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default

    # ---- autograd -------------------------------------------------------------------------------
    # What `torch.no_grad()` calls; a plain call in C, which a Ctrl-C cannot cut in two.
    set_grad_enabled = torch._C._set_grad_enabled

    # ---- modes of libraries ---------------------------------------------------------------------
    # `torch.backends.cudnn.benchmark = x` is Python, which a Ctrl-C can cut in two.
    set_cudnn_benchmark = torch._C._set_cudnn_benchmark
    # Setters of what all kernels go by: which library, how exact, which type without another one.
    # (Those of fused attention are none: what they choose is an operation.)
    FLAG_SETTERS = tuple(
        name
        for name in (
            "_set_blas_preferred_backend",
            "_set_cpu_allow_fp16_reduced_precision_reduction",
            "_set_cublas_allow_bf16_reduced_precision_reduction",
            "_set_cublas_allow_fp16_accumulation",
            "_set_cublas_allow_fp16_reduced_precision_reduction",
            "_set_cublas_allow_tf32",
            "_set_cudnn_allow_tf32",
            "_set_cudnn_benchmark",
            "_set_cudnn_depthwise_kernel",
            "_set_cudnn_deterministic",
            "_set_cudnn_enabled",
            "_set_default_dtype",
            "_set_default_tensor_type",
            "_set_deterministic_algorithms",
            "_set_deterministic_fill_uninitialized_memory",
            "_set_float32_matmul_precision",
            "_set_fp32_precision_setter",
            "_set_linalg_preferred_backend",
            "_set_mkldnn_deterministic",
            "_set_mkldnn_enabled",
            "_set_nnpack_enabled",
            "_set_onednn_allow_tf32",
            "_set_qengine",
        )
        if hasattr(torch._C, name)  # each version has some of its own
    )
    SETTERS_OF: Any = torch._C
    # A property of `torch.backends`, which calls such a setter that it has kept.
    FlagProperty: Any = torch.backends.ContextProp
    # Two flags each. A public property answers for one of them, and a captured graph keeps both.
    fp16_reduced_precision = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
    bf16_reduced_precision = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    # A kernel that only lasts: timing, and tests that need a slow stream.
    spin = torch.cuda._sleep

    # ---- kernels on lists of tensors ------------------------------------------------------------
    # torch.optim is made of them; whoever wants their bits calls them too.
    foreach_lerp_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
except (ImportError, AttributeError) as error:
    raise ImportError(_describe_missing(str(error))) from error

# ---- CUDA builds --------------------------------------------------------------------------------

# Frees what cuBLAS keeps for each thread and stream. No public function does.
clear_cublas_workspaces = _of_cuda_builds("_cuda_clearCublasWorkspaces")
# Gives pinned memory back to the system: the twin of torch.cuda.empty_cache() for the host.
empty_host_cache = _of_cuda_builds("_host_emptyCache")

# ---- names as text ------------------------------------------------------------------------------

# Ops that keep something for their backward only where autograd is on while the kernel runs.
ASKING_AUTOGRAD = frozenset({"mkldnn_rnn_layer"})

# ---- attributes of objects ----------------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """Arguments and results of an op: which are written, which are views."""
    return _attribute(op, "_schema")


def name_of(op: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return _attribute(op, "_opname")


def is_held_by_others(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of the first of these tensors is held by anything but them. Memory that
    no allocator of PyTorch's has made counts as nobody's."""
    storage = tensors[0].untyped_storage()
    if not storage.resizable():
        return False
    mine = sum(each.untyped_storage().data_ptr() == storage.data_ptr() for each in tensors)
    holders = _attribute(torch._C, "_storage_Use_Count")(_attribute(storage, "_cdata"))
    return holders > mine + 1  # `storage` is one


def generator_key(generator: torch.Generator) -> int:
    """One number a generator: an op gets another object for the same generator."""
    return _attribute(generator, "_cdata")


def compiled_graphs() -> Any:
    """The class of what Inductor makes, whose calls run its kernels; None before `torch.compile`
    was called. The kernels take addresses, and nothing public is between them and their caller."""
    module = sys.modules.get("torch._inductor.output_code")
    return None if module is None else _attribute(module, "CompiledFxGraph")


def is_set_up_by_a_call(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has still to set the module up, in its first call. Nothing public says so."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    return _attribute(_attribute(module, "_get_fsdp_state")(), "_is_root") is None


CONVERSION = "_apply"  # of a Module: `to()` and `half()` call it, and no hook sees gradients there


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


def drop_kernels(library: Any) -> None:
    """Take back what a `torch.library.Library` has registered. Dropping it does so at some time."""
    library._destroy()


def register_shape_functions() -> None:
    """Have operations on tensors of `meta` find shapes that no function in C++ finds. Importing the
    module does it, which takes a while."""
    from torch import _meta_registrations  # noqa: F401
