"""Finds what does not go together with the section `elastic`."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from perfect.config.elastic_schema import ElasticConfig

Place = tuple[str | int, ...]
AS_PEERS_DO: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "host_budget": (None,),
    "recompute": ("auto",),
    "optimizer": ("auto",),
    "engine": ("auto",),
    "verify": (True,),
    "plan_cache": (None,),
    "host_dir": (None,),
})  # fmt: skip
"""The keys of `offload` that a peer does not know, each with its default, and with the value that
says what a peer does anyway: it compares and traces no step again."""


def elastic_conflicts(raw: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield the place of each conflict, and the reason. `raw` is plain data that may have other
    problems, which the schema reports."""
    elastic = raw.get("elastic")
    if not isinstance(elastic, dict):
        return

    def given(section: str, key: str) -> Any:
        there = raw.get(section)
        return there.get(key) if isinstance(there, dict) else None

    yield from _unknown_to_peers(raw.get("offload"))
    devices, accumulate = given("trainer", "devices"), given("trainer", "accumulate")
    if type(devices) is int and devices > 1:
        why = f"is {devices}, but a peer of a swarm trains on one device: start a peer for each"
        yield ("trainer", "devices"), why
    if type(accumulate) is int and accumulate > 1:
        why = f"is {accumulate}, but lanes are micro-batches already: remove it, and raise"
        yield ("trainer", "accumulate"), f"{why} loader.batch_size and elastic.lanes"
    if given("trainer", "precision") == "16-mixed":
        why = "16-mixed scales gradients by what one peer has seen, so peers would differ"
        yield ("trainer", "precision"), f"{why}: give bf16-mixed or 32-true"
    if given("data", "name") == "lines":
        why = "lines of a lane have another number of tokens than those of another, but lanes count"
        yield ("data", "name"), f"{why} samples: give wikitext2, or train without a swarm"
    if given("loader", "buffer_bytes") is not None:
        why = "decides how many batches are buffered, but how many lanes a peer has changes"
        yield ("loader", "buffer_bytes"), f"{why}: give buffer_batches, which counts for each lane"
    yield from _undivided(raw, elastic)
    peers, lanes = elastic.get("peers"), _lanes(elastic)
    if type(peers) is int and type(lanes) is int and lanes < peers:
        why = f"is {peers}, but there are only {lanes} lanes, so some peers would do nothing"
        yield ("elastic", "peers"), f"{why}: raise lanes"


def _unknown_to_peers(offload: Any) -> Iterator[tuple[Place, str]]:
    """Yield the keys of `offload` that a peer cannot keep to: it plans its lanes by a budget."""
    if not isinstance(offload, dict):
        return
    if offload.get("budget") is None:
        why = "is missing, and a peer of a swarm plans its lanes only by one"
        yield ("offload", "budget"), f"{why}: give it, or remove offload"
    for key, known in AS_PEERS_DO.items():
        if key in offload and offload[key] not in known:
            why = f"is {offload[key]}, but a peer of a swarm plans its lanes by budget alone"
            yield ("offload", key), f"{why}: remove it"


def _undivided(raw: dict[str, Any], elastic: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield the global batches that lanes do not divide."""
    lanes = _lanes(elastic)
    if type(lanes) is not int or lanes < 1:
        return
    loader, phases = raw.get("loader"), raw.get("phases")
    places: list[Place] = [("loader", "batch_size")]
    sizes: list[Any] = [loader.get("batch_size", 128) if isinstance(loader, dict) else 128]
    for number, phase in enumerate(phases if isinstance(phases, list) else []):
        if isinstance(phase, dict) and phase.get("batch_size") is not None:
            places.append(("phases", number, "batch_size"))
            sizes.append(phase["batch_size"])
    for place, size in zip(places, sizes, strict=True):
        if type(size) is int and size > 0 and size % lanes:
            why = f"is {size}, the samples of a step over all peers, which {lanes} lanes do not"
            yield place, f"{why} divide: change it, or elastic.lanes"


def _lanes(elastic: dict[str, Any]) -> Any:
    return elastic.get("lanes", ElasticConfig.model_fields["lanes"].default)
