"""The private names of torch that trainers use beside those of offload/torch_seams.py.

Where one is gone, importing this file raises an ImportError that names it.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

try:
    # The options of two collectives. They are public on a page of torch's and in no module's list.
    _c10d: Any = distributed_c10d
    AllToAllOptions = _c10d.AllToAllOptions
    AllgatherOptions = _c10d.AllgatherOptions
    _gloo: Any = distributed.ProcessGroupGloo
    # Options hold the device and the timeout of a group. The public `new_group` takes the
    # address from the environment of the process, and registers the group for ever.
    _GlooOptions = _gloo._Options
    # A device is the address that gloo listens on, with the one thread that moves its bytes.
    _create_device = _gloo.create_device
    # The timeout of operations is another than that of forming. Nothing public changes it.
    _set_timeout = _gloo._set_default_timeout
    # Which storage a tensor has. The public ways ask a live step of another thread for its bytes.
    _C: Any = torch._C
    storage_id = _C._storage_id
except AttributeError as error:
    raise ImportError(
        f"torch {torch.__version__}: {error}. trainers needs it (trainers/torch_seams.py) and was"
        " tested with torch>=2.11,<2.16: install such a version"
    ) from error

_THREADS = 4
"""So many operations of a group are under way at once. Gloo's own number is two."""
_CONNECT_PATIENCE = 5
"""So many times as long as its timeout gloo waits until another member has connected."""


def gloo_group(
    store: distributed.Store,  # pyright: ignore[reportPrivateImportUsage]
    rank: int,
    size: int,
    host: str,
    forming: timedelta,
    operation: timedelta,
) -> distributed.ProcessGroupGloo:
    """Return a connected group that is registered nowhere, with a device of its own.

    Each other member has `forming` to connect, and each operation may take `operation`. The store
    hears of a fraction of `forming`, and is to know better.
    """
    options = _GlooOptions()
    options._devices = [_create_device(hostname=host, lazy_init=False)]
    options._threads = _THREADS
    options._timeout = forming / _CONNECT_PATIENCE
    try:
        group = _gloo(store, rank, size, options)
    finally:
        del options  # An error's traceback would keep the device, and its thread with it.
    _set_timeout(group, operation)
    return group
