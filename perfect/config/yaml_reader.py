"""Reads a run's YAML strictly, and reports all problems at once as `file:line: key: reason`.

    yaml.compose -> nodes with lines -> plain data + {key path: line} -> schema -> RunConfig
                                                       problems, sorted by line -> ConfigError

An unknown key is reported with the nearest known one, and a key that is given twice is a problem.
YAML 1.1 reads `1e-3` as text; here it is read as a number.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from perfect.config.conflicts import find_conflicts
from perfect.config.fields import unknown
from perfect.config.schema import RunConfig
from perfect.errors import ConfigError

MOST_BYTES, MOST_VALUES, DEEPEST = 128 * 1024, 5_000, 40
"""Our own configurations have 130 values at most, and are 6 deep."""
MOST_PROBLEMS, LONGEST = 100, 500
"""So many problems are shown at once, and so many characters of each."""
Path_ = tuple[str | int, ...]
Problem = tuple[Path_, str]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Source:
    """The line of each key of a file, or the option that set it."""

    name: str
    lines: dict[Path_, int | str]

    def describe(self, path: Path_, reason: str) -> str:
        """Return `file:line: key: reason`. A missing key gets the line of its parent."""
        here = path
        if here not in self.lines:  # a place in a list may be given as text
            here = tuple(int(part) if str(part).isdecimal() else part for part in path)
        while here and here not in self.lines:
            here = here[:-1]
        line = self.lines.get(here, 1)
        where = line if isinstance(line, str) else f"{self.name}:{line}"
        known = isinstance(line, str) and here == path  # the option names the key already
        key = "" if known else ".".join(str(part) for part in path)
        return f"{where}: {key}: {reason}" if key else f"{where}: {reason}"


@dataclass(frozen=True, slots=True)
class Document:
    """A file as plain data, with what was wrong with it as YAML."""

    source: Source
    data: dict[str, Any]
    problems: tuple[str, ...]


def read_config(path: Path) -> tuple[RunConfig, Source]:
    """Return the configuration in `path`, or raise ConfigError with everything that is wrong."""
    return run_of(read_document(path))


def run_of(document: Document) -> tuple[RunConfig, Source]:
    """Return the document's configuration of a run."""
    config, mistakes = check_run(document.data, document.source)
    problems = [*document.problems, *(document.source.describe(*problem) for problem in mistakes)]
    if config is None or problems:
        raise config_error(problems)
    return config, document.source


def read_document(path: Path) -> Document:
    """Read a file that has sections, or raise ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content[:MOST_BYTES].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(
            [f"{path}: cannot be read: {getattr(error, 'strerror', error)}"]
        ) from error
    if len(content) > MOST_BYTES:
        raise config_error([f"{path}: has more than {MOST_BYTES:,} bytes: give a smaller file"])
    try:
        loader = _Loader(text)
        data = loader.plain_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # An error without a mark has its place in the text.
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        what = "" if isinstance(error, TooLarge) else "this is not YAML: "
        raise config_error([f"{path}:{line}: {what}{reason}"]) from error
    if not isinstance(data, dict):
        raise config_error([f"{path}:1: the file must have sections: model:, data:, phases:"])
    source = Source(str(path), loader.lines)
    return Document(source, data, tuple(source.describe(*problem) for problem in loader.problems))


def read_dump(path: Path) -> Any:
    """Return the data that we wrote into a file, or raise ConfigError. Text such as 1e-3, which
    `yaml.safe_dump` writes without quotes, stays text."""
    if problems := read_document(path).problems:  # as few aliases may stand for much
        raise config_error(problems)
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_value(text: str) -> Any:
    """Return the value that a text stands for in a file. Raise what `with_settings` expects."""
    loader = _Loader(text)
    data = loader.plain_data()
    if loader.problems:
        raise ValueError(loader.problems[0][1])
    return data


def check_run(data: dict[str, Any], source: Source) -> tuple[RunConfig | None, list[Problem]]:
    """Return the configuration of a run, or None and all that is wrong with it."""
    config, problems = validated(RunConfig, data, source)
    return config, [*find_conflicts(data), *problems]


def validated(
    model: type[Model], data: dict[str, Any], source: Source
) -> tuple[Model | None, list[Problem]]:
    """Return the data as this model, or None and each problem with its place."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        errors = [e for e in error.errors() if not _is_reported(e["input"])]
        return None, [_problem(e, source, model) for e in errors[:MOST_PROBLEMS]]


def config_error(problems: Sequence[str]) -> ConfigError:
    """Return the error with these problems, in the order of the file."""
    first = sorted(map(shown, problems), key=_line)[:MOST_PROBLEMS]
    more = [f"only the first {MOST_PROBLEMS} problems are shown: correct these"]
    return ConfigError(first if len(first) < MOST_PROBLEMS else [*first, *more])


def shown(problem: str) -> str:
    """Escape what a terminal would not show, and leave out the middle of a long problem."""
    half = LONGEST // 2
    short = problem if len(problem) <= LONGEST else f"{problem[:half]} ... {problem[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def _line(problem: str) -> int:
    match = re.search(r":(\d+): ", problem)
    return int(match.group(1)) if match else 0


UNREADABLE = "\0"
"""Replaces a value that was reported already, so that the schema does not report it again."""


class TooLarge(yaml.MarkedYAMLError):
    """A YAML has too many values, or is too deep."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1, with 1e-3 and 5e4 read as numbers, and with bounds. Scalars are plain: tags of
    Python types, numbers of more than 64 bits and text that is not UTF-8 are problems."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Path_, int | str] = {}
        self.problems: list[Problem] = []
        self._values = self._depth = 0

    def plain_data(self) -> Any:
        """Return the data; note the line of each key and what is wrong."""
        try:
            node = self.get_single_node()
        except (ValueError, OverflowError) as error:  # an escape or version of many digits
            why = str(error)
            raise yaml.MarkedYAMLError(problem=why, problem_mark=self.get_mark()) from error
        self._values = 0
        return None if node is None else self._plain(node, ())

    def compose_node(self, parent: Any, index: Any) -> Any:
        with self._count(self.peek_event().start_mark):
            return super().compose_node(parent, index)

    @contextmanager
    def _count(self, mark: yaml.Mark) -> Iterator[None]:
        """Count a value that begins here. An alias counts as all that it stands for."""
        self._values += 1
        self._depth += 1
        if self._depth > DEEPEST:
            why = f"this is nested more than {DEEPEST} deep: nest it less"
            raise TooLarge(problem=why, problem_mark=mark)
        if self._values > MOST_VALUES:
            why = f"there are more than {MOST_VALUES:,} values, aliases counted in full: give fewer"
            raise TooLarge(problem=why, problem_mark=mark)
        yield
        self._depth -= 1

    def _plain(self, node: yaml.Node, path: Path_) -> Any:
        with self._count(node.start_mark):
            self.lines.setdefault(path, node.start_mark.line + 1)
            long = len(node.value) > LONGEST and node.tag in NUMBERS  # 1:1:1:... takes its square
            if long or node.tag not in PLAIN_TAGS:
                return self._unreadable(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._plain(item, (*path, n)) for n, item in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            try:
                value = self.construct_object(node, deep=True)
                node.value.encode()
            except Exception:  # `!!int x`: whatever the reader of a type raises
                return self._unreadable(node, path)
            large = isinstance(value, int) and abs(value) >= 2**63
            return self._unreadable(node, path) if large else value

    def _unreadable(self, node: yaml.Node, path: Path_) -> str:
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        self.problems.append((path, f"'{text}' is not a value of the type {node.tag}"))
        return UNREADABLE

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or len(key_node.value) > LONGEST:
                why = f"the key on line {line} is no name: give text of up to {LONGEST} characters"
                self.problems.append((path, why))
                continue
            here = (*path, key_node.value)
            if key_node.value in mapping:
                why = f"is given twice (again on line {line}): keep one"
                self.problems.append((here, why))
                continue
            self.lines[here] = line
            mapping[key_node.value] = self._plain(value_node, here)
        return mapping


NUMBERS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
PLAIN_TAGS = (
    *NUMBERS,
    *(f"tag:yaml.org,2002:{name}" for name in ("bool", "map", "null", "seq", "str", "timestamp")),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _is_reported(given: Any) -> bool:
    return given == UNREADABLE or (isinstance(given, dict) and UNREADABLE in given.values())


def _problem(error: Any, source: Source, model: type[BaseModel]) -> Problem:
    path: Path_ = ()
    for number, part in enumerate(error["loc"]):
        last = number == len(error["loc"]) - 1
        # pydantic's loc also names members of unions and their tags, which are not in the file.
        if (*path, part) in source.lines or (last and error["type"] == "missing"):
            path = (*path, part)
    kind, ctx = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        *place, key = error["loc"]
        of_a_grid = () if place else ("grid", "fleet")
        return path, unknown("key", str(key), (*_keys_at(place, model), *of_a_grid))
    if kind == "missing":
        return path, "is missing"
    if kind == "value_error":
        return path, str(ctx["error"])
    if kind == "union_tag_not_found":
        tag = _tag_name(ctx)
        return path, f"{tag} is missing: give it, to say which kind is meant"
    if kind == "union_tag_invalid":
        known = tuple(re.findall(r"'([^']+)'", ctx["expected_tags"]))
        return path, unknown(_tag_name(ctx).partition(" or ")[0], ctx["tag"], known)
    if kind == "literal_error":
        known = tuple(re.findall(r"'([^']+)'", ctx["expected"]))
        return path, unknown("value", str(error["input"]), known)
    if kind == "model_type":
        return path, f"must be a section with keys, not {error['input']!r}"
    if kind in ("too_short", "too_long"):
        limit = ctx.get("min_length", ctx.get("max_length"))
        more = "more" if kind == "too_short" else "fewer"
        return path, f"must have {limit} or {more} entries, not {ctx['actual_length']}"
    message = error["msg"].replace("Input should be", "must be")
    return path, f"{message}, not {error['input']!r}"


def _tag_name(ctx: Any) -> str:
    """Return the key, or the function's name, that selects the kind of a union, in words."""
    return ctx["discriminator"].strip("'()").replace("_or_", " or ")


def _keys_at(loc: Sequence[str | int], root: type[BaseModel]) -> Iterator[str]:
    """Yield the keys that the schema allows at a pydantic location."""
    models: list[type[BaseModel]] = [root]
    for part in loc:
        if isinstance(part, int):
            continue
        inner = [m for model in models if part in model.model_fields
                 for m in _models_in(model.model_fields[part].annotation)]  # fmt: skip
        tagged = [m for m in models if _tag(m) == part]
        models = inner or tagged or models
    for model in models:
        yield from model.model_fields


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _tag(model: type[BaseModel]) -> str | None:
    for key in ("name", "rule"):
        field = model.model_fields.get(key)
        if field is not None and get_args(field.annotation):
            return cast(str, get_args(field.annotation)[0])
    return None
