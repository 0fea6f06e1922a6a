"""A class of the user's, named in the YAML by `class_path`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from perfect.errors import BuildError


def construct(made: Callable[..., Any], arguments: dict[str, Any], key: str) -> Any:
    try:
        return made(**arguments)
    except TypeError as error:
        raise BuildError(key, f"do not fit: {error}") from error


def load_class(path: str, key: str) -> Callable[..., Any]:
    """`mypkg.module.Class`, importable from the folder the command runs in."""
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        # perfect-train, unlike python -m, does not look here by itself. Last: nothing is shadowed.
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BuildError(
            key, f"cannot import '{path}': {error}; give package.module.Class, importable from here"
        ) from error
