"""What the code of a function or class consists of, and which code is a user's own.

    a user's code      its instructions, constants and names, and the globals that it reads
    an installed       its name and the version of its package; libraries are not read
    package's code

Comments and line numbers do not count.
"""

import dis
import importlib.metadata
import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

READS_A_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
OF_EVERY_CLASS = frozenset({"_abc_impl"})


def library_of(module: object) -> str | None:
    """The package and version that the module of this name is of. None: it is the user's own."""
    if not isinstance(module, str):
        return None
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0]:
        return top  # our decoders add their own version
    if top in sys.stdlib_module_names and top != "__main__":
        return f"python {platform.python_version()}"
    return _version(top) if _is_installed(top) else None


@cache
def _is_installed(top: str) -> bool:
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or [])]
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for place in places:
        if place is not None:
            path = Path(place)
            if {"site-packages", "dist-packages"} & {*path.parts}:
                return True
            if any(path.is_relative_to(folder) for folder in folders):
                return True
    return False


@cache
def _version(top: str) -> str:
    version = getattr(sys.modules.get(top), "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(top)
        except importlib.metadata.PackageNotFoundError:
            version = ""
    return f"{top} {version}"


def instructions(code: CodeType) -> list[Any]:
    """What a function does, without line numbers. Sets are in the order of their text."""
    constants = [
        instructions(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else each
        for each in code.co_consts
    ]
    names = [code.co_names, code.co_freevars, code.co_cellvars, code.co_varnames]
    return [code.co_code, code.co_flags, *names, constants]


def nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def globals_read(function: FunctionType) -> dict[str, Any]:
    """The globals that a function reads, by their names."""
    values = function.__globals__
    return {name: values[name] for name in _names_of_globals(function.__code__) if name in values}


@cache
def _names_of_globals(function: CodeType) -> list[str]:
    steps = (step for code in nested(function) for step in dis.get_instructions(code))
    return sorted({str(step.argval) for step in steps if step.opname in READS_A_GLOBAL})


def names_used(function: FunctionType) -> list[str]:
    """All names in a function: of globals, of attributes, of what it imports."""
    return sorted({name for code in nested(function.__code__) for name in code.co_names})


def imported_files(function: FunctionType) -> list[str]:
    """The files of the user's own modules that a function imports when it runs."""
    package = function.__globals__.get("__package__")
    files: list[str] = []
    for code in nested(function.__code__):
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[number - 2].argval if number >= 2 else 0
                dots = "." * level if isinstance(level, int) else ""
                files += _file_of(dots + str(step.argval), package)
    return sorted(set(files))


def _file_of(module: str, package: str | None) -> list[str]:
    try:
        full = importlib.util.resolve_name(module, package)
        module_ = sys.modules.get(full)
        origin = getattr(module_, "__file__", None)
        if module_ is None:
            spec = importlib.util.find_spec(full)
            origin = None if spec is None else spec.origin
    except (ImportError, ValueError, AttributeError):
        return []
    if origin is None or library_of(full) is not None:
        return []
    parts = {*Path(origin).parts}
    return [] if {"site-packages", "dist-packages"} & parts else [origin]


def members_of(kind: type) -> dict[str, Any]:
    """The functions and values that a user wrote into a class, sorted by name."""
    members: dict[str, Any] = {}
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType) or name in OF_EVERY_CLASS:
            continue
        is_special = name.startswith("__") and name.endswith("__")
        if not is_special or isinstance(value, FunctionType | classmethod | staticmethod):
            members[name] = value
    return members
