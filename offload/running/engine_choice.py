"""Chooses the engine that runs a step on a device, and the driver that it uses."""

import torch

from offload.errors import OffloadError
from offload.gate import Gate
from offload.running.drivers.cuda import Cuda
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.engines.cudagraph import CudaGraph
from offload.running.engines.serial import Serial
from offload.running.engines.streams import Streams
from offload.running.engines.threads import Threads
from offload.running.engines.work import ORDERS, Engine

CUDA, CUDAGRAPH = "cuda", "cudagraph"
ENGINES = ("threads", "serial", CUDA, CUDAGRAPH)


def engine_for(wanted: str | None, device: torch.device) -> str:
    """The name of the engine for this device. Raises if the wanted one cannot run there."""
    if wanted is not None and wanted not in ENGINES:
        raise ValueError(f"engine {wanted!r} is unknown; choose one of {', '.join(ENGINES)}")
    if device.type == "cpu":
        return wanted or "threads"
    if wanted in ("threads", "serial"):
        raise OffloadError(
            f"engine {wanted!r} runs on the CPU, but this step was captured on {device}. Use"
            f" engine {CUDA!r}"
        )
    return wanted or CUDA


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is unknown; choose one of {', '.join(ORDERS)}")


def driver_for(engine: str, device: torch.device, given: Cuda | None) -> Cuda | None:
    """The driver of an engine; None for an engine of the CPU. It allocates nothing."""
    if engine == CUDA:
        return Cuda(device) if given is None else given
    if engine == CUDAGRAPH:
        if given is not None and not isinstance(given, GraphCuda):
            raise ValueError(f"engine {engine!r} needs a driver that captures: {given} does not")
        return GraphCuda(device) if given is None else given
    if given is not None:
        raise ValueError(f"engine {engine!r} takes no driver; {CUDA} and {CUDAGRAPH} do")
    return None


def make_engine(
    name: str, driver: Cuda | None, order: str, seed: int, host_workers: int, gate: Gate
) -> Engine:
    if driver is not None:
        streams = Streams(driver, order, seed, host_workers, gate=gate)
        if name == CUDAGRAPH and isinstance(driver, GraphCuda):
            return CudaGraph(driver, streams, gate)
        return streams
    if name == "serial":
        return Serial(order, seed, gate=gate)
    return Threads(order, seed, host_workers, gate=gate)
