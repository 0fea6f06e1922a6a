"""Which devices a fleet has."""

from collections.abc import Sequence

import torch

from trainers.fleet.deciding.fleet_error import FleetError

Devices = str | int | Sequence[str | int]


def devices_of(given: Devices) -> tuple[torch.device, ...]:
    """Return the devices that `Fleet(devices=...)` names. `auto`: every GPU, or the CPU if there is
    none; a number: so many GPUs; a list: names of devices, or numbers of GPUs."""
    count = torch.cuda.device_count()
    if given == "auto":
        return tuple(torch.device("cuda", n) for n in range(count)) or (torch.device("cpu"),)
    if isinstance(given, bool) or (isinstance(given, int) and given < 1):
        raise FleetError(f"devices={given!r}: give auto, a number of GPUs, or a list of devices")
    if isinstance(given, int):
        given = list(range(given))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names:
        raise FleetError(f"devices={given!r}: give auto, a number of GPUs, or a list of devices")
    found = tuple(_device(name, count) for name in names)
    if len({device.type for device in found}) > 1:
        raise FleetError(
            f"devices={given!r} are of several kinds, and a job has other last bits on each of"
            " them: give devices of one kind"
        )
    gpus = [device for device in found if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise FleetError(f"devices={given!r} names one GPU twice: name each once")
    return found


def _device(name: str | int, count: int) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise FleetError(
            f"devices: {name!r} is no device: give cpu, cuda:0, or the number of a GPU"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise FleetError(f"devices: a fleet runs on the CPU and on CUDA devices, not on {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    number = device.index or 0
    if number >= count:
        has = f"{count} GPU{'s' * (count != 1)}" if count else "no GPU"
        raise FleetError(f"devices: {name!r} is not there: this machine has {has}")
    return torch.device("cuda", number)
