"""Checks that all our packages are imported from one place.

`python -m perfect.train` puts the current folder first on the import path. If a user's project has
a folder named `loaders`, it would be imported in place of ours, and an error would appear only
later.
"""

from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("loaders", "offload", "trainers")


def check_siblings() -> None:
    """Raise `ImportError` if another package shadows one of ours."""
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
