"""The reference's generated pages: YAML keys from the schema and what it says of each of them,
commands from their `--help`, errors from the docstrings of their classes."""

import ast
import importlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TREES = (
    "loaders.LoaderError", "offload.OffloadError", "perfect.errors.PerfectError",
    "trainers.fleet.FleetError", "trainers.elastic.errors.ElasticError",
)  # fmt: skip


def pages() -> dict[str, str]:
    """The text of each page by its path in the site."""
    made = (("yaml", yaml_page()), ("commands", commands_page()), ("errors", errors_page()))
    return {f"reference/{name}.md": text for name, text in made}


def commands_page() -> str:
    """What each command prints for `--help`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mains = dict(scripts["project"]["scripts"])
    mains["python -m loaders.convert"] = "loaders.convert:main"
    parts = ["# Commands", "Each command prints this page's text for `--help`."]
    os.environ["COLUMNS"] = "88"
    for name, where in sorted(mains.items()):
        module, function = where.split(":")
        with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
            getattr(importlib.import_module(module), function)(["--help"])
        if "usage:" not in printed.getvalue():
            raise RuntimeError(f"{name} --help has printed no help")
        parts.append(f"## {name}\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(parts)


def errors_page() -> str:
    """Every error's docstring: its first paragraph is the cause, the rest says what to do."""
    for package in ("loaders", "offload", "perfect", "trainers"):
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if "error" in found.name.rsplit(".", 1)[1]:
                importlib.import_module(found.name)
    parts = ["# Errors", "Each package raises errors of its own tree, and its first class catches"
             " all of them. A message names the value; this page says what to do."]  # fmt: skip
    for tree in TREES:
        module, name = tree.rsplit(".", 1)
        base = getattr(importlib.import_module(module), name)
        rows = [f"| `{c.__name__}` | {' | '.join(cleaned(c))} |" for c in descendants(base)]
        head = ["| error | cause | what to do |", "|---|---|---|"] if rows else []
        parts += [f"## {name}", " ".join(cleaned(base)), "\n".join((*head, *rows))]
    return "\n\n".join(parts)


def descendants(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from descendants(cls)


def cleaned(cls: type) -> tuple[str, str]:
    """The cause; what to do, which may stand in a base."""
    parts = [inspect.cleandoc(one.__doc__ or "").partition("\n\n") for one in cls.__mro__[:-3]]
    remedy = next((remedy for _, _, remedy in parts if remedy), "")
    return " ".join(parts[0][0].split()), " ".join(remedy.split())


def yaml_page() -> str:
    """A table for each section of the YAML."""
    schema = importlib.import_module("perfect.config.schema")
    grids = importlib.import_module("perfect.config.grid_schema")
    parts = ["# YAML keys", "`perfect-train` checks every key before anything runs. It refuses an"
             " unknown key, a value of another type and a key without effect, with their lines. The"
             " first table has the sections. `grid` maps paths of keys to values."]  # fmt: skip
    shown: set[str] = set()
    known = {cls.__name__: cls for cls in descendants(schema.Section)}
    for title, model in (("A run", schema.RunConfig), ("fleet", grids.FleetConfig)):
        tree = model.model_json_schema()
        tables(title, tree, tree.get("$defs", {}), known, parts, shown)
    return "\n\n".join(parts)


def tables(title: str, node: dict[str, Any], defs: dict[str, Any], known: dict[str, type],
           parts: list[str], shown: set[str]) -> None:  # fmt: skip
    notes = key_notes(known[node["title"]])
    rows, inner = [], []
    for key, value in node.get("properties", {}).items():
        if not notes.get(key):
            raise RuntimeError(
                f"{node['title']}.{key} has no meaning: write one in perfect/config, below the key"
                " or in a comment beside it"
            )
        default = "needed" if key in node.get("required", []) else default_of(value)
        rows.append(f"| `{key}` | {kind(value, defs)} | {default} | {notes[key]} |")
        inner += [(key, name) for name in references(value)]
    head = "| key | value | default | meaning |\n|---|---|---|---|"
    parts.append(f"## {title}\n\n" + "\n".join((head, *rows)))
    for key, name in inner:
        if name not in shown:
            shown.add(name)
            place = key if title == "A run" else f"{title}: {key}"
            properties = defs[name]["properties"]
            word = next((one["const"] for one in properties.values() if "const" in one), "")
            tables(f"{place} ({word})" if word else place, defs[name], defs, known, parts, shown)


def default_of(value: dict[str, Any]) -> str:
    if isinstance(value.get("default"), dict) or "$ref" in value:
        return ""
    return f"`{json.dumps(value['default'])}`" if value.get("default") is not None else "none"


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"].rsplit("/", 1)[1]] if "$ref" in value else []
        value = [item for key, item in value.items() if key != "discriminator"]
        return own + references(value)
    return [name for item in value for name in references(item)] if isinstance(value, list) else []


WORDS = {"integer": "whole number", "number": "number", "string": "text",
         "boolean": "true or false", "object": "keys", "null": "none"}  # fmt: skip
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def kind(value: dict[str, Any], defs: dict[str, Any]) -> str:
    """What may stand there, in words."""
    if "anyOf" in value or "oneOf" in value:
        each = [kind(one, defs) for one in value.get("anyOf") or value["oneOf"]]
        return " or ".join(dict.fromkeys(word for word in each if word != "none"))
    if "$ref" in value:
        return "a section"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {kind(value.get('items', {}), defs)}"
    limits = [f"{SIGNS[k]} {value[k]}" for k in SIGNS if k in value]
    return " ".join([WORDS.get(value.get("type", ""), "any value"), *limits])


def key_notes(model: type) -> dict[str, str]:
    """The docstring below each key of a section and of its bases, or the comment beside the key."""
    found: dict[str, str] = {}
    for cls in reversed([c for c in model.__mro__ if c.__module__.startswith("perfect.")]):
        source = inspect.getsource(cls)
        (node,) = ast.parse(source).body
        body = node.body if isinstance(node, ast.ClassDef) else []
        for key, below in itertools.zip_longest(body, body[1:]):
            if not isinstance(key, ast.AnnAssign):
                continue
            line = source.splitlines()[(key.end_lineno or 0) - 1]
            text = line[key.end_col_offset :].partition("#")[2]
            if isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
            found[ast.unparse(key.target)] = " ".join(text.split()).replace("|", "\\|")
    return found
