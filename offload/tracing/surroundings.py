"""Finds what a step can reach besides its arguments: modules, tensors, objects with attributes.

    step -- closure, globals, defaults --> function, object, module --> their attributes, some deep
                                                        |
                                  tensors by storage: a name, and all that share it

The names are for people. A tensor that is not found here works as well, as a nameless constant.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from offload.program.frames import is_foreign
from offload.program.kernels import CPU
from offload.torch_seams import storage_key
from offload.tracing.collectives import check_own_bytes

Watched = dict[int, tuple[str, Any]]
DEPTH = 3
LIBRARIES = ("torch.", "builtins", "numpy", "lightning", "pytorch_lightning", "collections")
"""Libraries whose objects are not searched."""
OF_TORCH = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.Generator)


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """The modules, tensors and objects that a step can reach besides its arguments."""

    modules: Mapping[int, str]
    """The path of every module, by its id."""
    tensors: Mapping[int, tuple[str, torch.Tensor, bool]]
    """By storage: a name, a tensor, and whether a module holds it."""
    sharing: Mapping[int, Sequence[torch.Tensor]]
    """By storage: all tensors that lie in it."""
    roots: Mapping[str, Any]
    """What the step begins with: a function, a module and its hooks."""
    objects: Watched
    """Objects with attributes."""
    generators: Sequence[torch.Generator] = ()
    """Generators that the step may draw from."""

    def with_others(self, tensors: Sequence[torch.Tensor]) -> "Surroundings":
        """The same with these tensors, in case nothing leads to them."""
        sharing = {key: list(known) for key, known in self.sharing.items()}
        for tensor in tensors:
            known = sharing.setdefault(storage_key(tensor), [])
            if all(tensor is not other for other in known):
                known.append(tensor)
        return replace(self, sharing=sharing)

    def reachable(self) -> Iterator[torch.Tensor]:
        """All tensors, except single numbers outside of modules: kernels take those from the
        CPU."""
        for key, known in self.sharing.items():
            _, _, in_module = self.tensors.get(key, ("", None, False))
            if in_module or not all(map(_is_number, known)):
                yield from known


def _is_number(tensor: torch.Tensor) -> bool:
    alone = tensor.dim() == 0 and tensor.untyped_storage().nbytes() == tensor.element_size()
    return alone and tensor.device == CPU and not tensor.requires_grad


def surroundings(things: Mapping[str, Any]) -> Surroundings:
    """The modules, tensors and objects that a step (or a module and its loss) reaches."""
    found: Watched = {}
    for name, thing in things.items():
        _reach(name, thing, found, DEPTH)
    roots = _roots(found)
    modules: dict[int, str] = {}
    tensors: dict[int, tuple[str, torch.Tensor, bool]] = {}
    sharing: dict[int, list[torch.Tensor]] = {}
    for prefix, root in roots:
        prefix = prefix if len(roots) > 1 else ""
        for path, module in root.named_modules():
            modules.setdefault(id(module), _join(prefix, path))
            found.setdefault(id(module), (_join(prefix, path), module))
        for path, tensor in (*root.named_parameters(), *root.named_buffers()):
            check_own_bytes(tensor, f"the module has a tensor {_join(prefix, path)}")
            key = storage_key(tensor)
            tensors.setdefault(key, (_join(prefix, path), tensor, True))
            sharing.setdefault(key, []).append(tensor)
    for name, thing in found.values():
        if isinstance(thing, torch.Tensor) and thing.layout is torch.strided:
            key = storage_key(thing)
            tensors.setdefault(key, (name, thing, False))
            sharing.setdefault(key, []).append(thing)
    objects = {
        key: (modules.get(key, name), thing)
        for key, (name, thing) in found.items()
        if hasattr(thing, "__dict__") and not isinstance(thing, torch.Tensor | FunctionType)
    }
    generators = [thing for _, thing in found.values() if isinstance(thing, torch.Generator)]
    return Surroundings(modules, tensors, sharing, things, objects, generators)


def _roots(found: Watched) -> list[tuple[str, torch.nn.Module]]:
    modules = [(n, m) for n, m in found.values() if isinstance(m, torch.nn.Module)]
    inner = {id(child) for _, m in modules for child in m.modules() if child is not m}
    return [(name, module) for name, module in modules if id(module) not in inner]


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _reach(name: str, thing: Any, found: Watched, depth: int) -> None:
    """Follow what a function closes over, and what objects hold, some levels deep."""
    if id(thing) in found or depth < 0:
        return
    if isinstance(thing, str | bytes | int | float | ModuleType | type | None):
        return
    if isinstance(thing, OF_TORCH):
        found[id(thing)] = (name, thing)
        if isinstance(thing, torch.nn.Module):
            for path, module in thing.named_modules():
                _reach_inside(_join(name, path), module.__dict__, found, 1)
        return
    if isinstance(thing, MethodType):
        _reach(name, thing.__self__, found, depth)
        _reach(name, thing.__func__, found, depth)
    elif isinstance(thing, FunctionType):
        found[id(thing)] = (name, thing)
        _reach_inside("", _closure(thing), found, depth)
    elif isinstance(thing, functools.partial):
        parts = {"": thing.func, **{str(n): a for n, a in enumerate(thing.args)}, **thing.keywords}
        _reach_inside(name, parts, found, depth)
    elif isinstance(thing, Mapping):
        _reach_inside(name, dict(thing), found, depth)
    elif isinstance(thing, list | tuple):
        _reach_inside(name, dict(enumerate(thing)), found, depth)
    elif not type(thing).__module__.startswith(LIBRARIES):
        found[id(thing)] = (name, thing)
        _reach_inside(name, getattr(thing, "__dict__", {}), found, depth)
        if callable(thing) and isinstance(method := type(thing).__call__, FunctionType):
            _reach_inside("", _closure(method), found, depth)


def _reach_inside(name: str, parts: Mapping[Any, Any], found: Watched, depth: int) -> None:
    for key, part in parts.items():
        _reach(_join(name, str(key)), part, found, depth - 1)


def _closure(function: FunctionType) -> dict[str, Any]:
    """What a function takes from outside: its cells, its defaults, the globals that it names."""
    inside: dict[str, Any] = {}
    code = function.__code__
    for name in _names(code):
        value = function.__globals__.get(name)
        own = isinstance(value, FunctionType) and not is_foreign(value.__code__.co_filename)
        if own or isinstance(value, OF_TORCH):
            inside[name] = value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            inside[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for number, value in enumerate(function.__defaults__ or ()):
        inside[f"default{number}"] = value
    return inside


def _names(code: CodeType) -> list[str]:
    """The names that a function uses, and those in the functions defined inside it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [*code.co_names, *(name for c in inner for name in _names(c))]
