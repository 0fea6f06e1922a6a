"""Finds keys of a YAML that have no effect because of what another section says."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

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

IN_MEMORY: Mapping[str, str] = MappingProxyType(
    {"cifar10": "CIFAR-10", "wikitext2": "WikiText-2", "lines": "a text"}
)
"""Data that is wholly in memory, in words."""


def idle_keys(raw: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each key without effect, and the reason. `raw` is plain data that may have other
    problems, which the schema reports."""

    def given(name: str) -> dict[str, Any]:
        section = raw.get(name)
        return section if isinstance(section, dict) else {}

    def differs_from_default(name: str, section: type[Section]) -> bool:
        default = section().model_dump(mode="json")
        return default | given(name) != default

    phases, model = raw.get("phases"), given("model")
    averaged = isinstance(phases, list) and any(
        isinstance(phase, dict) and phase.get("ema") is True for phase in phases
    )
    if isinstance(phases, list) and not averaged and differs_from_default("ema", EmaConfig):
        yield ("ema",), "has no effect: no phase has ema: true"
    if model.get("class_path") is not None:
        for name, section in (("task", TaskConfig), ("optimizer", OptimizerConfig)):
            if differs_from_default(name, section):
                yield (name,), f"has no effect: {model['class_path']} decides this"
    if isinstance(raw.get("offload"), dict):
        yield from _idle_offload(given("offload"), given("trainer"))
    data = given("data").get("name")
    if isinstance(data, str) and data in IN_MEMORY:
        default = LoaderConfig().model_dump(mode="json")
        kind, steps = given("loader").get("worker_kind"), raw.get("augment")
        steps = steps if isinstance(steps, list) else []
        own_steps = any("class_path" in step for step in steps if isinstance(step, dict))
        if own_steps or kind == "thread":  # it runs the own steps; what lies in memory has threads
            default["worker_kind"] = kind
        for key in ("backend", "cache", "on_error", "worker_kind"):
            if given("loader").get(key, default[key]) != default[key]:
                yield (
                    ("loader", key),
                    f"has no effect: {IN_MEMORY[data]} is wholly in memory, so no file is read",
                )
    if data in TEXTS and raw.get("augment"):
        yield ("augment",), "has no effect: a text has no pictures"
    if data in TEXTS and model.get("name") in MODEL_NAMES:
        names = ", ".join(LANGUAGE_MODEL_NAMES)
        yield (
            ("model", "name"),
            f"{model['name']} takes pictures, but the data is text: give one of {names}",
        )
    if model.get("name") in LANGUAGE_MODEL_NAMES:
        if data in ("cifar10", "imagefolder"):
            yield (
                ("data", "name"),
                f"{data} has pictures, but {model['name']} takes text: give wikitext2 or lines",
            )
        if given("switch").get("rule") == "plateau":
            reason = "plateau watches the accuracy, and a language model has none"
            yield ("switch", "rule"), f"{reason}: give fixed or budget"


def _idle_offload(
    offload: dict[str, Any], trainer: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    engine, accelerator = offload.get("engine", "auto"), trainer.get("accelerator", "auto")
    devices = trainer.get("devices", 1)
    if engine in ("cuda", "cudagraph") and accelerator == "cpu":
        yield (
            ("offload", "engine"),
            f"{engine} runs on a GPU, but trainer.accelerator is cpu: give auto or threads",
        )
    if engine == "threads" and accelerator == "gpu":
        yield (
            ("offload", "engine"),
            "threads runs on the CPU, but trainer.accelerator is gpu: give auto, cuda or cudagraph",
        )
    if accelerator == "gpu" and type(devices) is int and devices > 1:
        yield (
            ("trainer", "devices"),
            f"is {devices}, but offload runs on one GPU so far: give 1, or remove offload",
        )
