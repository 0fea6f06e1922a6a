"""Mutates the YAMLs of configs/, and reads them: each is read, or refused by a `ConfigError`.

cd tests; python -m fuzz.fuzz_yaml --seconds 60 --seed 0
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.fuzzing import TryOne, main

from perfect.config.grid_reader import read_recipe
from perfect.errors import ConfigError

SEEDS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
PIECES = (
    *("&a ", "*a", "<<: *a", "? ", ": ", "- ", "[", "]", "{", "}", "|", ">", "!!int ", "!!set "),
    *("!!python/name:os.system ", "!x ", "%YAML 1.9\n", "---\n", "...\n", "#", "'", '"', "\t"),
    *("\\ud800", "\\UFFFFFFFF", "\0", "\u2028", "\ufeff", "\x1b[2J", "\udcff", "\r\n", "~", "="),
    *("9" * 400, "9" * 5000, "0x" + "f" * 500, "1:1:1", "1e999", ".nan", "-.inf", "1" + ":1" * 200),
    *("2001-13-45", "0001-01-01 00:00:00 +23:59", "true", "null", "-1", "0", "1e-3", "k" * 2000),
    *("? " + "9" * 5000 + "\n: 1\n", "grid:\n  ? phases." + "9" * 400 + "\n  : [1]\nfleet: {}\n"),
    *("grid:\n  optimizer.lr: [1e-3, 1e-2]\nfleet: {}\n", "grid:\n  phases.0: [1]\n", "fleet: 1\n"),
    *("elastic: {}\n", "model: {class_path: a.B, init_args: {c: 1}}\n", "seed, loader.batch_size"),
)


def mutated(text: str, dice: random.Random) -> str:
    """Return the text with one change."""
    here, there = sorted(dice.randrange(len(text) + 1) for _ in range(2))
    lines = text.splitlines(keepends=True) or [""]
    line, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(7):
        case 0 | 1:
            return text[:here] + dice.choice(PIECES) + text[here:]
        case 2:  # in the place of a value
            key, colon, _ = lines[line].partition(": ")
            lines[line] = f"{key}{colon}{dice.choice(PIECES)}\n"
        case 3:
            return text[:here] + text[min(there, here + 20) :]
        case 4:
            lines.insert(line, lines[other])
        case 5:
            lines[line] = " " * dice.randrange(6) + lines[line].lstrip(" ")
        case _:
            return text[:here] + chr(dice.choice((dice.randrange(128), dice.randrange(0xD800))))
    return "".join(lines)


@contextmanager
def fuzzer() -> Iterator[TryOne]:
    """Give what reads one mutated YAML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"

        def try_one(rng: random.Random) -> None:
            text = rng.choice(SEEDS).read_text(encoding="utf-8")
            for _ in range(rng.randint(1, 4)):
                text = mutated(text, rng)
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            try:
                read_recipe(path)
            except ConfigError as error:
                assert error.problems and all(one.isprintable() for one in error.problems), text
            except Exception as error:
                error.add_note(repr(text))
                raise

        yield try_one


if __name__ == "__main__":
    sys.exit(main(__doc__, fuzzer))
