"""The method PerFect: pre-train on reused samples, switch, fine-tune on fresh ones.

The stable names are in `public_names.py`; `python -m perfect` lists the programs.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

SIBLINGS = ("loaders", "offload", "trainers")


def check_siblings() -> None:
    """Raise `ImportError` if another package shadows one of ours.

    `python -m perfect.train` puts the current folder first on the import path, so a user's folder
    named `loaders` would be imported in place of ours, and an error would appear only later.
    """
    home = Path(__file__).resolve().parent.parent
    for name in SIBLINGS:
        spec = find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise ImportError(
                f"'{name}' would be imported from {origin or 'an unknown place'}, not from"
                f" {home / name}: run perfect-train (not python -m), or leave the folder that holds"
                f" another '{name}'"
            )


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
