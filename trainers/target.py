"""Where the steps of a run are made: the device, the engine that runs plans there, its rates.

    Trainer(accelerator="cpu")   engine auto: threads                          rates: the planner's
    Trainer(accelerator="gpu")   engine auto: cuda      cudagraph when asked   rates: measured once

`auto` is `cuda` on a GPU because that engine runs every plan, can say what each node waited for,
and shows an error near the node that made it. `cudagraph` saves the host's share of a step, and
costs a capture a plan; where it cannot capture a step it says so and uses `cuda`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision

from offload import Costs, OffloadError, Plan, Runner
from offload.calibration import calibrate
from offload.drivers import Driver
from offload.drivers.cuda import check_cuda
from offload.kernels import CPU
from offload.machine import memory_left

ENGINES = ("auto", "threads", "cuda", "cudagraph")
OF_CUDA = ("cuda", "cudagraph")
MakeDriver = Callable[[], Driver]


@dataclass(frozen=True, slots=True)
class Target:
    """Of one run."""

    device: torch.device = CPU
    engine: str = "threads"
    driver: MakeDriver | None = None
    """Makes what drives the device; None: what the engine takes by itself. For tests."""
    costs: Costs | None = None
    """None: the planner's own."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """For people."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else self.device.type

    @property
    def may_vary(self) -> bool:
        """Whether kernels may have other last bits from run to run."""
        return self.on_gpu and not torch.are_deterministic_algorithms_enabled()

    @property
    def measures(self) -> bool:
        """Whether a plan is asked again after its first runs: what kernels and links take together
        is known better then. The CPU's kernels were measured on the engine that runs them."""
        return self.engine in OF_CUDA

    @property
    def why_not_late(self) -> str:
        """Why no update waits for the next step's forward pass here; empty: it may."""
        # The host waits at every cut of the graph: they would run beside nothing.
        return (
            "engine cudagraph runs host tasks by themselves" if self.engine == "cudagraph" else ""
        )

    def free_bytes(self) -> int:
        """Of the device, with what torch holds and does not use; the CPU's is the host's memory, as
        far as this process's cgroup lets it."""
        if not self.on_gpu:
            return memory_left().nbytes
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held

    def measured(self, plugin: Precision) -> "Target":
        """With this GPU's rates, if they are not known yet. It takes seconds."""
        if not self.on_gpu or self.costs is not None:
            return self
        return replace(self, costs=calibrate(self.device, products_of(plugin)))

    def runner(self, plan: Plan, key: Hashable = None) -> Runner:
        driver = self.driver() if self.driver is not None else None
        return Runner(plan, self.engine, key=key, driver=driver)


def products_of(plugin: Precision) -> str:
    """The type of most matrix products, as the calibration calls it."""
    if str(getattr(plugin, "precision", "")).startswith(("bf16", "16")):
        return "bfloat16"
    # What `torch.set_float32_matmul_precision` sets, too.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"


ON_CPU = Target()


def check_engine(engine: str) -> None:
    """What can be told before there is a trainer."""
    if engine not in OF_CUDA:
        return
    try:
        check_cuda(torch.device("cuda", 0))
    except OffloadError as error:
        raise OffloadError(f"engine={engine!r} needs a CUDA device: {error}") from error


def target_of(
    engine: str,
    accelerator: Accelerator | None,
    device: torch.device,
    driver: MakeDriver | None = None,
) -> Target:
    """Raise `OffloadError` where this engine does not run on this device."""
    kind = type(accelerator).__name__
    if isinstance(accelerator, CPUAccelerator) and device.type == "cpu":
        if engine in OF_CUDA and driver is None:
            raise OffloadError(
                f"engine={engine!r} runs on a GPU, and the trainer's accelerator is {kind}: give"
                " Trainer(accelerator='gpu'), or engine auto or threads"
            )
        return Target(device, "threads" if engine == "auto" else engine, driver)
    if isinstance(accelerator, CUDAAccelerator) and device.type == "cuda":
        if engine == "threads":
            raise OffloadError(
                "engine='threads' runs on the CPU, and the trainer's accelerator is"
                f" {kind}: give engine auto, cuda or cudagraph, or Trainer(accelerator='cpu')"
            )
        return Target(device, "cuda" if engine == "auto" else engine, driver)
    raise OffloadError(
        f"OffloadStrategy runs on the CPU and on CUDA devices, not on {device} with {kind}: give"
        " Trainer(accelerator='cpu') or Trainer(accelerator='gpu', devices=1)"
    )
