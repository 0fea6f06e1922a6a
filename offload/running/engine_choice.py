"""Chooses the engine that runs a step on a device, and the driver that it uses."""

from typing import cast

import torch

from offload.errors import OffloadError
from offload.gate import Gate
from offload.running.drivers.capturing import Capturing
from offload.running.drivers.cuda import Cuda
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.drivers.driver import Driver
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


def driver_for(engine: str, device: torch.device, given: Driver | None) -> Driver | None:
    """The driver of an engine; None for an engine of the CPU. It allocates nothing."""
    if engine == CUDA:
        return Cuda(device) if given is None else given
    if engine == CUDAGRAPH:
        if given is not None and not hasattr(given, "begin_capture"):
            raise ValueError(f"engine {engine!r} needs a driver that captures: {given} does not")
        return GraphCuda(device) if given is None else given
    if given is not None:
        raise ValueError(f"engine {engine!r} has no use for a driver: {CUDA}, {CUDAGRAPH} have")
    return None


def made_engine(
    name: str, driver: Driver | None, order: str, seed: int, host_workers: int, gate: Gate
) -> Engine:
    if driver is not None:
        streams = Streams(driver, order, seed, host_workers, gate=gate)
        return CudaGraph(cast(Capturing, driver), streams, gate) if name == CUDAGRAPH else streams
    if name == "serial":
        return Serial(order, seed, gate=gate)
    return Threads(order, seed, host_workers, gate=gate)
