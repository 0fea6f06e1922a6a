"""The file of a swarm's secret, which nobody else may read."""

from pathlib import Path


def write_secret(folder: Path, text: str = "0123456789abcdef" * 2) -> Path:
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(text)
    return path
