"""What all fuzzers have: inputs of a seed, for so many seconds, until one ends in a wrong way."""

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

DEEP = "@deep@"
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 7, 10**400, 1e308, -1e308, 5e-324, 0.5, float("nan"), float("inf"), "", "b",
    "\ud800", "\u2028", "\x1b[31m\0", "<script>", "[/red]", [], [1], [[]], [None], [{}],
    [["a", 1]], {}, {"": 1}, DEEP,
)  # fmt: skip
BYTES = (
    b"", b"\xff", b"\0", b"\0" * 40, b"\n", b'"', b",", b"9" * 400, b"9" * 5000, b"1e300", b"1e999",
    b"\x0c", b"}", b"x" * 200_000,
)  # fmt: skip
TryOne = Callable[[random.Random], object]
"""Makes an input and tries it. It raises for what is neither served nor refused, and adds the input
as a note."""


def main(doc: str | None, fuzzer: Callable[[], AbstractContextManager[TryOne]]) -> int:
    """Run a fuzzer, and return its exit code."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end, tried = time.monotonic() + args.seconds, 0
    with fuzzer() as try_one:
        while time.monotonic() < end:
            try:
                try_one(random.Random(args.seed + tried))
            except Exception:
                traceback.print_exc()
                sys.stderr.write(f"the same input comes first with --seed {args.seed + tried}\n")
                return 1
            tried += 1
    sys.stdout.write(f"{tried} inputs, each of them served or refused\n")
    return 0


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a value of JSON with a part of it replaced, left out, or there twice."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    whole = value.copy()
    key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    if (dice := rng.random()) < 0.1:
        del whole[key]
    elif dice < 0.2 and isinstance(whole, list):
        whole.insert(rng.randrange(len(whole)), whole[key])
    else:
        whole[key] = mutated(value[key], rng)
    return whole


def deepened(text: str, rng: random.Random) -> bytes:
    """Return a text of JSON with a nest of some depth in the place of `DEEP`."""
    depth = rng.choice((40, 900, 100_000))
    return text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with others in the place of some, and in some cases without the rest."""
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(BYTES) + data[at + rng.randrange(3) :] * rng.choice((0, 1, 1))
