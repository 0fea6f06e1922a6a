"""Puts the values of the option --set into what a YAML says: `--set loader.batch_size=64`.

A value is read and checked as if it stood in the file. What is wrong with one is told with its
option instead of a line.
"""

import copy
from collections.abc import Sequence
from typing import Any

import yaml

from perfect.config.grid import paths_of
from perfect.config.grid_schema import GridSections
from perfect.config.key_paths import parts_of, put, why_not
from perfect.config.yaml_reader import Document, Source, read_value


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """Return the document with each `KEY=VALUE` in it; problems are added to those it has."""
    data, lines = copy.deepcopy(document.data), dict(document.source.lines)
    problems = list(document.problems)
    for setting in settings:
        key, _, text = setting.partition("=")
        where = f"--set {setting}"
        why = _why_not_set(setting, data)
        try:
            value = read_value(text)
        except (yaml.YAMLError, ValueError) as error:
            why = why or f"'{text}' is not a value of YAML: {str(error).splitlines()[0]}"
            value = None
        if why is not None:
            problems.append(f"{where}: {why}")
            continue
        put(data, key, value)
        parts = parts_of(key)
        for length in range(1, len(parts)):
            lines.setdefault(parts[:length], where)
        lines[parts] = where
    return Document(Source(document.source.name, lines), data, tuple(problems))


def _why_not_set(setting: str, data: dict[str, Any]) -> str | None:
    """Return why the key cannot be set; None if it can."""
    key, equals, _ = setting.partition("=")
    if not equals:
        return "give a key and its value, such as loader.batch_size=64"
    grid = data.get("grid")
    for axis in grid if isinstance(grid, dict) else ():
        for swept in paths_of(str(axis)):
            if f"{swept}.".startswith(f"{key}.") or f"{key}.".startswith(f"{swept}."):
                return f"has no effect, as grid gives {swept} its values: change them in the file"
    section = key.partition(".")[0]
    if section == "grid":
        return "the keys of a grid hold dots: change them in the file"
    of_a_grid = section == "fleet" and "fleet" in data
    return why_not(key, data, GridSections) if of_a_grid else why_not(key, data)
