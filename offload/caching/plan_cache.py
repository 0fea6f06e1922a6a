"""A folder of small files: what a search chose and what kernels cost, for later starts of a run.

    FOLDER/plan-KEY.json       {"kind", "key", "digest of the data", "data"}
    FOLDER/costs-KEY.json      KEY is a digest of all that the data depend on

A file is written under a name of its own and then renamed, so that several processes may share the
folder. What cannot be read is not used, and one line of the log names it. When the files take more
than `limit` bytes, the least recently used ones are removed. Nothing here is code: a file holds
numbers and texts, and its reader checks them.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Bytes of all files together. A plan's file has about ten kilobytes."""
OURS = re.compile(r"[a-z]+-[0-9a-f]{32}(\.json|\w+\.part)")


class PlanCache:
    """The entries of one folder. Several processes may use it."""

    def __init__(self, folder: str | Path, limit: int = LIMIT) -> None:
        self.folder = Path(folder).expanduser()
        self._limit = limit
        self._complained = False

    def read(self, kind: str, key: Sequence[Any]) -> Any:
        """Return what was kept under this key; None if nothing was, or if it is damaged."""
        path = self._path(kind, key)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return self._refuse(path, str(error))
        try:
            content = json.loads(text)
            named = content["kind"], content["key"], content["digest"]
            data = content["data"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return self._refuse(path, f"{type(error).__name__}: {error}")
        if named != (kind, path.stem, _digest(json.dumps(data))):
            return self._refuse(path, "its digest is another one")
        with suppress(OSError):
            os.utime(path)  # it was used now
        return data

    def write(self, kind: str, key: Sequence[Any], data: Any) -> None:
        """Keep `data`: numbers, texts, None, and lists and dicts (by text) of these."""
        path, text = self._path(kind, key), json.dumps(data)
        head = json.dumps({"kind": kind, "key": path.stem, "digest": _digest(text)})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(".part", path.stem, self.folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as opened:
                    opened.write(f'{head[:-1]}, "data": {text}}}\n')
                os.replace(unfinished, path)
            finally:
                Path(unfinished).unlink(missing_ok=True)
            self._trim(path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("plans are not kept in %s: %s", self.folder, error)

    def refuse(self, kind: str, key: Sequence[Any], why: str) -> None:
        """Log that the entry of this key is not used. The caller writes a new one."""
        self._refuse(self._path(kind, key), why)

    def _refuse(self, path: Path, why: str) -> None:
        log.warning("%s is not used, and made anew: %s", path, why)

    def _path(self, kind: str, key: Sequence[Any]) -> Path:
        return self.folder / f"{kind}-{_digest(repr((kind, *key)))}.json"

    def _trim(self, newest: Path) -> None:
        """Remove the files that were used least recently, but for the newest, until the limit is
        kept. Another process may do the same at the same time."""
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    files.append((stat.st_mtime, stat.st_size, path))
        left = sum(size for _, size, _ in files) - self._limit
        for _, size, path in sorted(files):
            if left <= 0:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                left -= size


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
