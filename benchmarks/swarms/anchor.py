"""An anchor as a process of its own, or on a thread of the caller's."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.wire.secret import read_secret

KNOWN = ("min_peers", "heartbeat", "only_anchor", "standby")
OTHERS = ("secret", "host", "port", "follows", "program", "out")


def make_anchor(settings: dict[str, Any], tell: Callable[[str], None]) -> Anchor:
    """`min_peers`, `heartbeat`, `only_anchor`, `standby`: as the anchor has them."""
    if unknown := settings.keys() - {*KNOWN, *OTHERS}:
        raise TypeError(f"an anchor has no {', '.join(sorted(unknown))}")
    known = {key: settings[key] for key in KNOWN if key in settings}
    anchor = Anchor(
        settings.get("host", "127.0.0.1"),
        settings.get("port", 0),
        read_secret(settings["secret"]),
        Settings(**known),
        log_line=tell,
    )
    if not settings.get("follows"):  # No anchor was there before it, so nobody could come back.
        anchor.roster.opened -= anchor.roster.settings.heartbeat
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
