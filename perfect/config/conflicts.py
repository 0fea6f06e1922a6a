"""Finds keys of a YAML that have no effect, or cannot be used, because of another section.

The functions take plain data that may have other problems, which the schema reports. They yield the
place of each key, and the reason.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from perfect.config.elastic_schema import ElasticConfig
from perfect.config.fields import Section
from perfect.config.schema import (
    LANGUAGE_MODEL_NAMES,
    MODEL_NAMES,
    TEXTS,
    EmaConfig,
    LoaderConfig,
    OptimizerConfig,
    TaskConfig,
)

Place = tuple[str | int, ...]
Raw = Mapping[str, Any]  # Any: plain data of a YAML
IN_MEMORY: Mapping[str, str] = MappingProxyType(
    {"cifar10": "CIFAR-10", "wikitext2": "WikiText-2", "lines": "a text"}
)
FIXED_FOR_PEERS: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "host_budget": (None,),
    "recompute": ("auto",),
    "optimizer": ("auto",),
    "engine": ("auto",),
    "verify": (True,),
    "plan_cache": (None,),
    "host_dir": (None,),
    "micro_batches": (1,),
})  # fmt: skip
"""The keys of `offload` that a peer of a swarm does not use, each with the only value allowed."""


def value_at(raw: Raw, section: str, key: str) -> Any:
    """Return the value of a key as it is written; None if it is missing."""
    return _section(raw, section).get(key)


def _section(raw: Raw, name: str) -> dict[str, Any]:
    section = raw.get(name)
    return section if isinstance(section, dict) else {}


def find_conflicts(raw: Raw) -> Iterator[tuple[Place, str]]:
    yield from _idle_sections(raw)
    yield from _model_and_data(raw)
    if isinstance(raw.get("offload"), dict):
        yield from _offload_conflicts(raw)
    if isinstance(raw.get("elastic"), dict):
        yield from _elastic_conflicts(raw)


def _idle_sections(raw: Raw) -> Iterator[tuple[Place, str]]:
    def differs_from_default(name: str, section: type[Section]) -> bool:
        default = section().model_dump(mode="json")
        return default | _section(raw, name) != default

    phases, own_model = raw.get("phases"), value_at(raw, "model", "class_path")
    averaged = isinstance(phases, list) and any(
        isinstance(phase, dict) and phase.get("ema") is True for phase in phases
    )
    if isinstance(phases, list) and not averaged and differs_from_default("ema", EmaConfig):
        yield ("ema",), "has no effect: no phase has ema: true"
    if own_model is not None:
        for name, section in (("task", TaskConfig), ("optimizer", OptimizerConfig)):
            if differs_from_default(name, section):
                yield (name,), f"has no effect: {own_model} decides this"


def _model_and_data(raw: Raw) -> Iterator[tuple[Place, str]]:
    data, model = value_at(raw, "data", "name"), value_at(raw, "model", "name")
    if isinstance(data, str) and data in IN_MEMORY:
        loader = _section(raw, "loader")
        default = LoaderConfig().model_dump(mode="json")
        kind, steps = loader.get("worker_kind"), raw.get("augment")
        steps = steps if isinstance(steps, list) else []
        own_steps = any("class_path" in step for step in steps if isinstance(step, dict))
        if own_steps or kind == "thread":  # it runs the own steps; data in memory has threads
            default["worker_kind"] = kind
        for key in ("backend", "cache", "on_error", "worker_kind"):
            if loader.get(key, default[key]) != default[key]:
                why = f"{IN_MEMORY[data]} is wholly in memory, so no file is read"
                yield ("loader", key), f"has no effect: {why}"
    if data in TEXTS and raw.get("augment"):
        yield ("augment",), "has no effect: a text has no pictures"
    if data in TEXTS and model in MODEL_NAMES:
        names = ", ".join(LANGUAGE_MODEL_NAMES)
        why = f"{model} takes pictures, but the data is text: give one of {names}"
        yield ("model", "name"), why
    if model in LANGUAGE_MODEL_NAMES and data in ("cifar10", "imagefolder"):
        why = f"{data} has pictures, but {model} takes text: give wikitext2 or lines"
        yield ("data", "name"), why
    if model in LANGUAGE_MODEL_NAMES and value_at(raw, "switch", "rule") == "plateau":
        why = "plateau watches the accuracy, and a language model has none: give fixed or budget"
        yield ("switch", "rule"), why


def _offload_conflicts(raw: Raw) -> Iterator[tuple[Place, str]]:
    engine = value_at(raw, "offload", "engine")
    accelerator = value_at(raw, "trainer", "accelerator")
    if engine in ("cuda", "cudagraph") and accelerator == "cpu":
        why = f"{engine} runs on a GPU, but trainer.accelerator is cpu: give auto or threads"
        yield ("offload", "engine"), why
    if engine == "threads" and accelerator == "gpu":
        why = "threads runs on the CPU, but trainer.accelerator is gpu: give auto, cuda or"
        yield ("offload", "engine"), f"{why} cudagraph"


def _elastic_conflicts(raw: Raw) -> Iterator[tuple[Place, str]]:
    yield from _offload_of_a_peer(raw.get("offload"))
    devices, accumulate = (value_at(raw, "trainer", key) for key in ("devices", "accumulate"))
    if type(devices) is int and devices > 1:
        why = f"is {devices}, but a peer of a swarm is one process: give offload.devices"
        yield ("trainer", "devices"), why
    if type(accumulate) is int and accumulate > 1:
        why = f"is {accumulate}, but lanes are micro-batches already: remove it, and raise"
        yield ("trainer", "accumulate"), f"{why} loader.batch_size and elastic.lanes"
    if value_at(raw, "trainer", "precision") == "16-mixed":
        why = "16-mixed scales gradients by what one peer has seen, so peers would differ"
        yield ("trainer", "precision"), f"{why}: give bf16-mixed or 32-true"
    if value_at(raw, "data", "name") == "lines":
        why = "lines of a lane have another number of tokens than those of another, but lanes count"
        yield ("data", "name"), f"{why} samples: give wikitext2, or train without a swarm"
    if value_at(raw, "loader", "buffer_bytes") is not None:
        why = "decides how many batches are buffered, but how many lanes a peer has changes"
        yield ("loader", "buffer_bytes"), f"{why}: give buffer_batches, which counts for each lane"
    lanes = _section(raw, "elastic").get("lanes", ElasticConfig.model_fields["lanes"].default)
    peers = value_at(raw, "elastic", "peers")
    if type(lanes) is int and lanes > 0:
        yield from _undivided_batches(raw, lanes)
    if type(peers) is int and type(lanes) is int and lanes < peers:
        why = f"is {peers}, but there are only {lanes} lanes, so some peers would do nothing"
        yield ("elastic", "peers"), f"{why}: raise lanes"


def _offload_of_a_peer(offload: Any) -> Iterator[tuple[Place, str]]:
    """Yield the keys of `offload` that a peer cannot use: it plans its lanes by a budget."""
    if not isinstance(offload, dict):
        return
    if offload.get("budget") is None:
        why = "is missing, and a peer of a swarm plans its lanes only by one"
        yield ("offload", "budget"), f"{why}: give it, or remove offload"
    for key, allowed in FIXED_FOR_PEERS.items():
        if key in offload and offload[key] not in allowed:
            why = f"is {offload[key]}, but a peer of a swarm plans its lanes by budget and devices"
            yield ("offload", key), f"{why}: remove it"


def _undivided_batches(raw: Raw, lanes: int) -> Iterator[tuple[Place, str]]:
    """Yield the global batches that lanes do not divide."""
    sizes: dict[Place, Any] = {
        ("loader", "batch_size"): _section(raw, "loader").get("batch_size", 128)
    }
    phases = raw.get("phases")
    for number, phase in enumerate(phases if isinstance(phases, list) else []):
        if isinstance(phase, dict) and phase.get("batch_size") is not None:
            sizes["phases", number, "batch_size"] = phase["batch_size"]
    for place, size in sizes.items():
        if type(size) is int and size > 0 and size % lanes:
            why = f"is {size}, the samples of a step over all peers, which {lanes} lanes do not"
            yield place, f"{why} divide: change it, or elastic.lanes"
