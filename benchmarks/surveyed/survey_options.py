"""The options that both surveys have, of modules and of pipelines."""

import argparse
import datetime
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def survey_options(doc: str | None, what: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """`doc`: the script's. `what` is surveyed, a "module" say; `names` are all of them."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help=f"two {what}s: see that it works")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of older code, to compare")
    parser.add_argument("--only", nargs="+", default=[], metavar=what.upper(), choices=[*names])
    parser.add_argument("--limit", type=float, default=240.0, help=f"seconds of a {what}'s process")
    parser.add_argument("--work", type=Path, help="keeps the runs, and goes on with those there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    return parser
