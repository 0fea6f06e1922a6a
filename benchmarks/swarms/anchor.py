"""An anchor as a process of its own, or on a thread of the caller's."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.wire import read_secret


def make_anchor(settings: dict[str, Any], tell: Callable[[str], None]) -> Anchor:
    """`first`: so many peers must be there before the first generation begins; later ones need
    `min_peers`. `heartbeat`, `only_anchor`: as the anchor has them."""
    first, least = settings.get("first", 1), settings.get("min_peers", 1)
    known = {key: settings[key] for key in ("heartbeat", "only_anchor") if key in settings}

    def heard(line: str) -> None:
        if line.startswith("generation "):
            later = dataclasses.replace(anchor.roster.settings, min_peers=least)
            anchor.roster.settings = later
        tell(line)

    anchor = Anchor(
        settings.get("host", "127.0.0.1"),
        settings.get("port", 0),
        read_secret(settings["secret"]),
        Settings(min_peers=max(first, least), **known),
        tell=heard,
    )
    return anchor


def main(settings: dict[str, Any]) -> None:
    def tell(line: str) -> None:
        print(line, flush=True)

    with make_anchor(settings, tell) as anchor:
        part = Path(settings["out"]) / "address.part"
        part.write_text(str(anchor.address))
        part.rename(part.with_suffix(".txt"))
        sys.stdout.flush()
        anchor.run()
