"""The rates of a machine, measured once for all starts that share a plan cache.

Rates differ a little whenever they are measured, and a plan is known by the rates that it was made
with. So a start uses the rates of the first one, on the same device with the same PyTorch.
"""

from dataclasses import asdict, fields
from typing import Any

import torch

from offload.caching.machine import machine_of, our_version
from offload.caching.plan_cache import PlanCache
from offload.graph.costs import Costs
from offload.measuring.calibration import calibrate

KIND = "rates"


def kept_rates(cache: PlanCache | None, device: torch.device, precision: str) -> Costs:
    """The rates of this device. They are measured if the cache has none, which takes seconds."""
    if cache is None:
        return calibrate(device, precision)
    key = (our_version(), machine_of(device), device.type, precision)
    data = cache.read(KIND, key)
    if data is not None:
        try:
            return _costs(data)
        except (TypeError, ValueError) as error:
            cache.refuse(KIND, key, f"{type(error).__name__}: {error}")
    found = calibrate(device, precision)
    cache.write(KIND, key, asdict(found))
    return found


def _costs(data: Any) -> Costs:
    kinds = {field.name: type(field.default) for field in fields(Costs)}
    if not isinstance(data, dict) or {name: type(rate) for name, rate in data.items()} != kinds:
        raise ValueError("these are no rates")
    if min(data.values()) <= 0:
        raise ValueError("a rate is 0 or less")
    return Costs(**data)
