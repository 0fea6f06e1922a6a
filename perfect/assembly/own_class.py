"""Loads and constructs a user's class that the YAML names by `class_path`.

A name that leads to no class is refused before anything is called: it may be any function.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from perfect.config.fields import NamedOrOwn
from perfect.errors import BuildError


def construct_own(section: NamedOrOwn, key: str, base: type[Any]) -> Any:
    """Load and construct the class that a section names, which derives from Lightning's `base`."""
    made = load_class(section.class_path or "", f"{key}.class_path")
    if not issubclass(made, base):
        what = f"lightning.{base.__name__}: derive it from one"
        raise BuildError(f"{key}.class_path", f"{section.class_path} is not a {what}")
    try:
        return made(**section.init_args)
    except TypeError as error:
        raise BuildError(
            f"{key}.init_args", f"the class does not take them: {error}; change them"
        ) from error


def named_classes(section: object) -> list[str]:
    """Return every class_path in a section of a configuration, and in the sections below it."""
    if isinstance(section, list):
        return [path for part in section for path in named_classes(part)]
    if not isinstance(section, dict):
        return []
    path = section.get("class_path")
    return [*([] if path is None else [str(path)]), *named_classes([*section.values()])]


def import_own_module(name: str) -> ModuleType:
    """Import a module of the user's, also from the folder in which the command runs."""
    if os.getcwd() not in sys.path:
        # perfect-train, unlike python -m, does not search this folder. It is put last, so that it
        # shadows nothing.
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def load_class(path: str, key: str) -> type[Any]:
    """Import `mypkg.module.Class`, also from the folder in which the command runs."""
    module, _, name = path.rpartition(".")
    try:
        named = getattr(import_own_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module}.".startswith(f"{missing}."):
            why = f"'{path}' cannot be imported: there is no module '{missing}'"
            raise BuildError(
                key, f"{why}; install its package, or run the command in the folder that has it"
            ) from error
        raise BuildError(
            key, f"'{path}' imports '{missing}', which is not installed: pip install {missing}"
        ) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise BuildError(
            key, f"'{path}' cannot be imported: {error}; give package.module.Class, found from here"
        ) from error
    if not isinstance(named, type):
        raise BuildError(key, f"'{path}' is not a class: give package.module.Class")
    return named
