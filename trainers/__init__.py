"""Who runs steps, on what: Lightning strategies over `offload` and `loaders`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.public_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names when one is first asked for: an anchor needs no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module("trainers.public_names"), name)
