"""The target of a run's plans: the device, the engine that runs them there, and its rates.

    Trainer(accelerator="cpu")   engine auto: threads                          rates: the planner's
    Trainer(accelerator="gpu")   engine auto: cuda      cudagraph when asked   rates: measured once

`auto` is `cuda` on a GPU because that engine runs every plan, can say what each node waited for,
and shows an error near the node that caused it. `cudagraph` saves the host's work in a step and
costs one capture per plan; if it cannot capture a step, it says so and uses `cuda`.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision

from offload import Costs, MemoryTooSmall, OffloadError, Plan, PlanCache, Runner
from offload.gate import Gate
from offload.graph.taskgraph import HOST
from offload.measuring.calibration import kept_rates
from offload.memory.host_memory import memory_left
from offload.program.kernels import CPU
from offload.running.drivers.cuda import check_cuda, check_devices
from offload.sizes import format_size

ENGINES = ("auto", "threads", "cuda", "cudagraph")
OF_CUDA = ("cuda", "cudagraph")
MakeRunner = Callable[[Plan, Hashable, "Target"], Runner]


@dataclass(frozen=True, slots=True)
class Target:
    """The device, engine and rates of one run."""

    device: torch.device = CPU
    engine: str = "threads"
    costs: Costs | None = None
    """None means the planner's default rates."""
    gate: Gate | None = None
    """Lets guests use the device between two nodes of a step (trainers/sharing)."""
    host_dir: Path | None = None
    """A folder for the files that are the memory of the host; None: it is RAM."""
    make_runner: MakeRunner | None = None
    """Makes the runners of a job whose device has other jobs; None: they have the device alone."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """The device's name for people."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else self.device.type

    def free_bytes(self) -> int:
        """Return the free bytes of the device, with those that torch holds and does not use. On
        the CPU this is the host memory that the process's cgroup allows."""
        if not self.on_gpu:
            return memory_left().nbytes
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held

    def check_room(self, plan: Plan, before: Plan | None = None) -> None:
        """Raise `MemoryTooSmall` if a plan that moves here has no room now. `before`: a plan on the
        same devices, whose memory is free by then."""
        arenas, freed = _device_arenas(plan), _device_arenas(before)
        if not self.on_gpu:  # the devices are parts of one memory
            arenas, freed = {0: sum(arenas.values())}, {0: sum(freed.values())}
        for number, nbytes in arenas.items():
            there = self if not number else replace(self, device=self.device_at(number))
            needed, left = nbytes + plan.reserve, there.free_bytes() + freed.get(number, 0)
            if needed > left:
                raise MemoryTooSmall(
                    f"{format_size(needed)} of {there.name} are needed to move there, but only"
                    f" {format_size(left)} are left. Nothing has moved: give a smaller budget, or"
                    " end what else uses memory",
                    needed=needed,
                    left=left,
                )

    def device_at(self, number: int) -> torch.device:
        """Return the device of this number, counted from the first one."""
        return torch.device(self.device.type, (self.device.index or 0) + number)

    def check_devices(self, count: int) -> None:
        """Raise `OffloadError` unless a plan can run on so many devices from this one on."""
        if self.on_gpu and count > 1:
            check_devices(self.device, count)

    def measured(
        self, plugin: Precision, cache: PlanCache | None = None, devices: int = 1
    ) -> "Target":
        """Return this target with the rates of its GPU, and of what several from it on share. It
        takes seconds if they are unknown."""
        known = self.costs is not None and (devices == 1 or self.costs.topology is not None)
        if not self.on_gpu or known:
            return self
        self.check_devices(devices)
        return replace(self, costs=kept_rates(cache, self.device, products_of(plugin), devices))

    def runner(self, plan: Plan, key: Hashable = None) -> Runner:
        if self.make_runner is not None:
            return self.make_runner(plan, key, self)
        return Runner(plan, self.engine, key=key, gate=self.gate, host_dir=self.host_dir)


def _device_arenas(plan: Plan | None) -> dict[int, int]:
    if plan is None:
        return {}
    return {arena: nbytes for arena, nbytes in plan.memgraph.arenas.items() if arena != HOST}


def products_of(plugin: Precision) -> str:
    """Return the number type of most matrix products, in the words of the calibration."""
    if str(getattr(plugin, "precision", "")).startswith(("bf16", "16")):
        return "bfloat16"
    # torch.set_float32_matmul_precision sets this, too.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"


ON_CPU = Target()


def check_engine(engine: str) -> None:
    """Raise `OffloadError` if this engine can run nowhere on this machine."""
    if engine not in OF_CUDA:
        return
    try:
        check_cuda(torch.device("cuda", 0))
    except OffloadError as error:
        raise OffloadError(f"engine={engine!r} needs a CUDA device: {error}") from error


@functools.cache
def accelerator_for(kind: str) -> Accelerator:
    """Return what Lightning calls an accelerator, for a kind of device that a run moves to. It is
    the same object every time: a step that reads it reads no other value after the move."""
    return CUDAAccelerator() if kind == "cuda" else CPUAccelerator()


def target_of(
    engine: str,
    accelerator: Accelerator | None,
    device: torch.device,
    host_dir: Path | None = None,
) -> Target:
    """Return the target of a run. Raise `OffloadError` if the engine does not run on the device."""
    kind = type(accelerator).__name__
    if isinstance(accelerator, CPUAccelerator) and device.type == "cpu":
        if engine in OF_CUDA:
            raise OffloadError(
                f"engine={engine!r} runs on a GPU, and the trainer's accelerator is {kind}: give"
                " Trainer(accelerator='gpu'), or engine auto or threads"
            )
        engine = "threads" if engine == "auto" else engine
        return Target(device, engine, host_dir=host_dir)
    if isinstance(accelerator, CUDAAccelerator) and device.type == "cuda":
        if host_dir is not None:
            raise OffloadError(
                f"host_dir={str(host_dir)!r} has no effect on a GPU, whose copies need page-locked"
                " memory, and pages of a file are not locked: remove it, or give"
                " Trainer(accelerator='cpu')"
            )
        if engine == "threads":
            raise OffloadError(
                "engine='threads' runs on the CPU, and the trainer's accelerator is"
                f" {kind}: give engine auto, cuda or cudagraph, or Trainer(accelerator='cpu')"
            )
        return Target(device, "cuda" if engine == "auto" else engine)
    raise OffloadError(
        f"OffloadStrategy runs on the CPU and on CUDA devices, not on {device} with {kind}: give"
        " Trainer(accelerator='cpu') or Trainer(accelerator='gpu', devices=1)"
    )
