"""The method PerFect: pre-train on reused samples, switch, fine-tune on fresh ones.

The stable names are in `public_names.py`; `python -m perfect` lists the programs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perfect.siblings import check_siblings

check_siblings()

if TYPE_CHECKING:
    from perfect.public_names import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """Import the public names when one is first asked for: a command's --help needs no torch."""
    if name == "__version__":
        return import_module("perfect.version").own_version()
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module("perfect.public_names"), name)
