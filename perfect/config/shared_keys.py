"""The keys of a configuration that all peers of a swarm must have in common, as flat texts.

{"optimizer": {"lr": 0.1}}  ->  {"config.optimizer.lr": "0.1"}

Where data lies, how a node decodes it, the budget of its device, and what it writes, are each
node's own affair.
"""

from collections.abc import Iterator
from typing import Any

from perfect.config.elastic_schema import OF_A_NODE

OWN = (
    "checkpoint",
    "data.root",
    *(f"elastic.{key}" for key in OF_A_NODE),
    "loader.cache",
    "loader.cache_bytes",
    "loader.cache_dir",
    "loader.cache_key",
    "loader.worker_kind",
    "loader.workers",
    "loggers",
    "model.weights",
    "offload",
    "trainer.accelerator",
    "trainer.threads",
)


def shared_keys(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a complete configuration, as `dump_config` gives it."""
    return {f"config.{path}": text for path, text in _leaves(config, "")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path in OWN:
        return
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    else:
        yield path, str(value)
