"""Our packages must be imported from one place: a folder `loaders/` of the user's own would win.

`python -m perfect.train` puts the current folder first on the import path, so a project with a
folder of one of our names would be imported instead of ours, and fail far from the cause.
"""

from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("loaders", "offload", "trainers")


def check_siblings() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in SIBLINGS:
        spec = find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise ImportError(
                f"'{name}' would be imported from {origin or 'nowhere'}, not from {home / name}:"
                " run perfect-train (not python -m) or leave the folder that holds another"
                f" '{name}'"
            )
