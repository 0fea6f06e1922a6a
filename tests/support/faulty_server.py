"""A HTTP server of a folder, in a thread, that answers parts of files and fails as it is told."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Faults:
    """What goes wrong, request by request, and what was asked."""

    fault: Callable[[int, str], str] = lambda number, path: ""
    """`fault(number, path)`, asked of every GET: "", "500", "stall" or "cut"."""
    ranges: bool = True
    """Whether the server knows parts of files."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The path and the range of each GET."""
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def served(folder: Path, faults: Faults) -> Generator[str]:
    """The address of a server of this folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            faults.asked.append((self.path, self.headers.get("Range", "")))
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = folder / self.path.lstrip("/")
            fault = faults.fault(len(faults.asked) - 1, self.path) if body else ""
            if fault == "500" or not path.exists():
                self.send_response(500 if fault else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            size, asked = len(data), self.headers.get("Range", "")
            if asked and faults.ranges:
                low, _, high = asked.removeprefix("bytes=").partition("-")
                first, last = int(low), min(int(high or size - 1), size - 1)
                if first >= size:
                    self.send_response(416)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                data = data[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            else:
                self.send_response(200)
            self.send_header("Accept-Ranges", "bytes" if faults.ranges else "none")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            if fault == "stall":
                self.wfile.write(data[:100])
                self.wfile.flush()
                faults.over.wait(30)
            elif fault == "cut":
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
            else:
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            faults.over.set()
            server.shutdown()
            thread.join()
