"""The schema of a run's YAML: what may stand there, what it means, what it is by default.

Complete and flat: what a YAML leaves out takes the default written here, and the run's own
`config.yaml` has everything. A key that would have no effect is an error. `reader.py` reads files.
"""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from loaders.reuse import Mode
from offload.sizes import is_share, parse_share, parse_size
from perfect.models import LANGUAGE_MODEL_NAMES, MODEL_NAMES
from perfect.schedule import Kind
from perfect.text import TestText


def unknown(what: str, got: str, known: tuple[str, ...]) -> str:
    """The sentence for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(got, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} '{got}'; {hint}"


Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]  # a whole number will do, text and true will not
Rate = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Weight = Annotated[Number, Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_size)]


def _as_written(given: object) -> object:
    """A size, checked and kept in its words."""
    nbytes = parse_size(given)
    return given if isinstance(given, str) else nbytes


def _size_or_share(given: object) -> object:
    if is_share(given):
        parse_share(str(given))
        return given
    try:
        return _as_written(given)
    except ValueError as error:
        raise ValueError(f"{error}, or a share of what the step needs, such as 80%") from None


Size = Annotated[str | int, BeforeValidator(_as_written)]
Budget = Annotated[str | int, BeforeValidator(_size_or_share)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def changed(section: Section) -> set[str]:
    """The keys that differ from their defaults: a complete dump says no more than its original."""
    return {
        name
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != field.get_default(call_default_factory=True)
    }


class NamedOrOwn(Section):
    """Either one of ours by `name`, or the user's class by `class_path`."""

    class_path: str | None = None
    init_args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_of_them(self) -> "NamedOrOwn":
        name = getattr(self, "name", None)
        if (name is None) == (self.class_path is None):
            raise ValueError("give either name or class_path")
        if self.class_path is None and self.init_args:
            raise ValueError("init_args has no effect without class_path")
        if self.class_path is not None:
            own = changed(self) - {"class_path", "init_args"}
            if own:
                raise ValueError(f"{', '.join(sorted(own))}: no effect beside class_path")
        return self


class LoraConfig(Section):
    rank: Count = 16
    alpha: Rate = 16.0
    """What is learned is scaled by alpha / rank."""


class ModelConfig(NamedOrOwn):
    name: str | None = None
    num_classes: Count | None = None
    """None: as many as the data set has (the vocabulary, of a text)."""
    dropout: Share | None = None
    """None: 0.1. Of GPT-2 alone."""
    weights: str | None = None
    """A folder with a checkpoint as transformers saves it (None: random weights)."""
    lora: LoraConfig | None = None
    """Freezes the model and learns this beside its matrices for K, V, Q and feed-forward."""

    @model_validator(mode="after")
    def _known_model(self) -> "ModelConfig":
        known = (*MODEL_NAMES, *LANGUAGE_MODEL_NAMES)
        if self.name is not None and self.name not in known:
            raise ValueError(unknown("model", self.name, known))
        idle = changed(self) & {"dropout", "weights", "lora"}
        if self.name in MODEL_NAMES and idle:
            raise ValueError(f"{', '.join(sorted(idle))}: no effect on {self.name}")
        if self.name is not None and self.name.startswith("llama") and "dropout" in idle:
            raise ValueError("dropout has no effect: LLaMA has none")
        return self


class DataConfig(NamedOrOwn):
    name: Literal["cifar10", "imagefolder", "wikitext2"] | None = None
    root: str = "data"
    picture_size: Count | None = None
    """Side of the stored square; pictures of a folder only."""
    holdout: Annotated[int, Field(strict=True, ge=0)] = 0
    """Training samples set aside for curves and the plateau rule."""
    train_samples: Count | None = None
    """Only so many of the rest are trained on (None: all)."""
    sequence: Count | None = None
    """Tokens of a sample; text only, like the rest."""
    vocabulary: Annotated[int, Field(strict=True, ge=256)] | None = None
    """Only the first so many entries of the BPE vocabulary (None: all)."""
    evaluation_samples: Count | None = None
    """Only so many blocks of the validation text, and of the test text (None: all)."""
    test_text: TestText = "tokens"
    """raw: the test text as it was written, without <unk>."""

    @model_validator(mode="after")
    def _size_where_it_counts(self) -> "DataConfig":
        if self.name == "imagefolder" and self.picture_size is None:
            raise ValueError("imagefolder needs picture_size, the side of the stored square")
        if self.name == "cifar10" and self.picture_size is not None:
            raise ValueError("picture_size has no effect: CIFAR-10 pictures have 32x32 pixels")
        return self

    @model_validator(mode="after")
    def _text_or_pictures(self) -> "DataConfig":
        if self.name is None:
            return self
        of_text = {"sequence", "vocabulary", "evaluation_samples", "test_text"}
        idle = changed(self) & (
            {"picture_size", "holdout"} if self.name == "wikitext2" else of_text
        )
        if idle:
            why = (
                "; validation has a text of its own (evaluation_samples)"
                if "holdout" in idle
                else ""
            )
            raise ValueError(f"{', '.join(sorted(idle))}: no effect on {self.name}{why}")
        if self.name == "wikitext2" and self.sequence is None:
            raise ValueError("wikitext2 needs sequence, the tokens of a sample")
        return self


class PadCropConfig(Section):
    name: Literal["pad_crop"]
    padding: Count = 4


class FlipConfig(Section):
    name: Literal["flip"]
    p: Annotated[Number, Field(gt=0, le=1)] = 0.5


class CutoutConfig(Section):
    name: Literal["cutout"]
    size: Count = 8


class RandomResizedCropConfig(Section):
    name: Literal["random_resized_crop"]
    size: Count
    min_scale: Annotated[Number, Field(gt=0, le=1)] = 0.08


AugmentConfig = Annotated[
    PadCropConfig | FlipConfig | CutoutConfig | RandomResizedCropConfig,
    Field(discriminator="name"),
]


class LoaderConfig(Section):
    batch_size: Count = 128
    buffer_batches: Count = 3
    """The buffer holds so many batches (never less than one)."""
    mode: Mode = "rolling"
    workers: Literal["auto"] | Count = "auto"
    worker_kind: Literal["thread", "process"] = "thread"
    """process: for a data set of your own whose __getitem__ is slow Python."""
    drop_last: Flag = False
    buffer_bytes: Bytes | None = None
    """At most so much for the buffer and the batches under way (8GiB, or a number)."""
    backend: Literal["native", "dali"] = "native"
    """Who decodes the pictures of a folder."""
    cache: Literal["ram", "disk"] | None = None
    """Keeps training samples decoded, for later passes (ram) and later runs too (disk)."""
    cache_bytes: Bytes | None = None
    """At most so much: of each process in RAM, of all of them together on disk."""
    cache_dir: str | None = None
    on_error: Literal["raise", "skip"] = "raise"
    """skip: another sample stands in for one that cannot be read. Evaluation always raises."""

    @field_validator("backend", mode="before")
    @classmethod
    def _no_beton(cls, given: object) -> object:
        if given == "ffcv":
            raise ValueError(
                "ffcv reads .beton files, which no data: section names; in a program of your own,"
                ' ReuseLoader("FILE.beton", backend="ffcv") does'
            )
        return given

    @model_validator(mode="after")
    def _whole_cache(self) -> "LoaderConfig":
        if self.cache is None:
            idle = changed(self) & {"cache_bytes", "cache_dir"}
            if idle:
                raise ValueError(f"{', '.join(sorted(idle))}: no effect without cache")
            return self
        if self.cache_bytes is None:
            raise ValueError(f"cache: {self.cache} needs cache_bytes, how much it may take")
        if self.cache == "disk" and self.cache_dir is None:
            raise ValueError("cache: disk needs cache_dir, the folder to keep it in")
        if self.cache == "ram" and self.cache_dir is not None:
            raise ValueError("cache_dir has no effect: a cache in RAM has no folder")
        return self


class TaskConfig(Section):
    label_smoothing: Share = 0.0


class OptimizerConfig(Section):
    name: Literal["sgd", "adamw"] = "sgd"
    lr: Rate = 0.1
    momentum: Share = 0.9
    nesterov: Flag = False
    weight_decay: Weight = 5e-4
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Of adamw: how slowly its averages of gradients and of their squares forget."""

    @model_validator(mode="after")
    def _momentum_is_sgd_s(self) -> "OptimizerConfig":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0")
        idle = changed(self) & {"momentum", "nesterov"}
        if self.name == "adamw" and idle:
            raise ValueError(f"{', '.join(sorted(idle))}: no effect on adamw")
        if self.name == "sgd" and "betas" in changed(self):
            raise ValueError("betas: no effect on sgd, it has momentum")
        return self


class ScheduleConfig(Section):
    kind: Kind
    lr: Rate
    final: Weight = 0.0
    warmup: Share = 0.0
    ramp: Annotated[Number, Field(gt=0, lt=1)] = 0.3
    part: Annotated[list[Number], Field(min_length=2, max_length=2)] = [0.0, 1.0]

    @model_validator(mode="after")
    def _effective(self) -> "ScheduleConfig":
        given = changed(self)
        if self.kind == "constant" and "final" in given:
            raise ValueError("final has no effect: a constant rate ends where it began")
        if self.kind != "onecycle" and "ramp" in given:
            raise ValueError("ramp has no effect: it belongs to onecycle (warmup elsewhere)")
        if self.kind == "onecycle" and "warmup" in given:
            raise ValueError("warmup has no effect: a onecycle goes up during ramp")
        if not 0 <= self.part[0] < self.part[1] <= 1:
            raise ValueError(f"part must be 0 <= begin < end <= 1, not {self.part}")
        return self


class PhaseConfig(Section):
    name: str
    passes: Count | None = None
    steps: Count | None = None
    reuse: Count = 1
    reaugment: Flag = True
    batch_size: Count | None = None
    lr: ScheduleConfig | None = None
    weight_decay: Weight | None = None
    ema: Flag = False
    reset_optimizer: Flag = False


class FixedSwitch(Section):
    rule: Literal["fixed"] = "fixed"


class BudgetSwitch(Section):
    rule: Literal["budget"]
    fresh_passes: Rate
    total: Rate


class PlateauSwitch(Section):
    """With fresh_passes and total the budget gives the latest start, else the phases' passes do."""

    rule: Literal["plateau"]
    fresh_passes: Rate | None = None
    total: Rate | None = None
    monitor: str = "val_accuracy"
    window: Annotated[int, Field(strict=True, ge=3)] | None = None
    """None: max(12, 7.5 % of the run's epoch-equivalents)."""
    accuracy_slope: Rate = 0.10
    loss_slope: Rate = 0.015
    hits: Count = 2
    earliest: Share = 0.25
    """Share of the run before which it does not fire."""

    @model_validator(mode="after")
    def _whole_budget(self) -> "PlateauSwitch":
        if (self.fresh_passes is None) != (self.total is None):
            raise ValueError("a budget needs both fresh_passes and total")
        return self


SwitchConfig = Annotated[FixedSwitch | BudgetSwitch | PlateauSwitch, Field(discriminator="rule")]


class EmaConfig(Section):
    decay: Annotated[Number, Field(gt=0, lt=1)] = 0.999


class TrainerConfig(Section):
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Count = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    validate_every: Rate = 1.0
    """Epoch-equivalents between validations on the hold-out."""
    accumulate: Count = 1
    gradient_clip: Rate | None = None
    threads: Count | None = None
    """CPU threads of torch (None: torch's own choice)."""


class OffloadConfig(Section):
    """The arguments of `OffloadStrategy`. How a run is made, not what comes of it: a run may go on
    with another one, or with none."""

    budget: Budget | None = None
    """Bytes of the device (8GiB), or a share of what the step needs (80%). None: all it needs."""
    host_budget: Size | None = None
    recompute: Literal["auto", "never"] = "auto"
    optimizer: Literal["auto", "device", "host"] = "auto"
    engine: Literal["auto", "threads", "cuda", "cudagraph"] = "auto"
    verify: Flag = True
    check_first_steps: Annotated[int, Field(strict=True, ge=0)] = 2
    """So many steps are made by plain Lightning too, and a difference stops the run."""

    @model_validator(mode="after")
    def _effective(self) -> "OffloadConfig":
        idle = changed(self) & {"recompute", "host_budget", "optimizer"}
        if self.optimizer == "host":
            idle -= {"host_budget", "optimizer"}  # the updates' state is there
        if self.budget is None and idle:
            raise ValueError(
                f"{', '.join(sorted(idle))}: no effect without a budget: everything stays on the"
                " device"
            )
        return self


class CheckpointConfig(Section):
    every_steps: Count = 500


class RunConfig(Section):
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0
    model: ModelConfig
    data: DataConfig
    augment: list[AugmentConfig] = []
    loader: LoaderConfig = LoaderConfig()
    task: TaskConfig = TaskConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    phases: Annotated[list[PhaseConfig], Field(min_length=1)]
    switch: SwitchConfig = FixedSwitch()
    ema: EmaConfig = EmaConfig()
    trainer: TrainerConfig = TrainerConfig()
    offload: OffloadConfig | None = None
    """None: the whole step on the device, as Lightning does it."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = []
    """Beside metrics.csv, which is always written; csv: Lightning's own CSV files too."""
    checkpoint: CheckpointConfig = CheckpointConfig()


def idle_keys(raw: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that would have no effect because of what another section says, told from plain data
    that may have other problems."""

    def given(name: str) -> dict[str, Any]:
        section = raw.get(name)
        return section if isinstance(section, dict) else {}

    def says_something(name: str, section: type[Section]) -> bool:
        default = section().model_dump(mode="json")
        return default | given(name) != default

    phases, model = raw.get("phases"), given("model")
    averaged = isinstance(phases, list) and any(
        isinstance(phase, dict) and phase.get("ema") is True for phase in phases
    )
    if isinstance(phases, list) and not averaged and says_something("ema", EmaConfig):
        yield ("ema",), "has no effect: no phase has ema: true"
    if model.get("class_path") is not None:
        for name, section in (("task", TaskConfig), ("optimizer", OptimizerConfig)):
            if says_something(name, section):
                yield (name,), f"has no effect: {model['class_path']} decides this"
    if isinstance(raw.get("offload"), dict):
        yield from _idle_offload(given("offload"), given("trainer"))
    data = given("data").get("name")
    if data in ("cifar10", "wikitext2"):
        default = LoaderConfig().model_dump(mode="json")
        called = {"cifar10": "CIFAR-10 lies decoded", "wikitext2": "WikiText-2 lies"}[data]
        for key in ("backend", "cache", "on_error", "worker_kind"):
            if given("loader").get(key, default[key]) != default[key]:
                yield (
                    ("loader", key),
                    f"has no effect: {called} in memory, there is nothing to read",
                )
    if data == "wikitext2" and raw.get("augment"):
        yield ("augment",), "has no effect: there are no pictures in a text"
    if data == "wikitext2" and model.get("name") in MODEL_NAMES:
        names = ", ".join(LANGUAGE_MODEL_NAMES)
        yield (
            ("model", "name"),
            f"{model['name']} sees pictures, and the data is text: give one of {names}",
        )
    if model.get("name") in LANGUAGE_MODEL_NAMES:
        if data in ("cifar10", "imagefolder"):
            yield (
                ("data", "name"),
                f"{data} has pictures, and {model['name']} reads text: give wikitext2",
            )
        if given("switch").get("rule") == "plateau":
            reason = "a plateau is told by accuracy, and a language model has loss and perplexity"
            yield ("switch", "rule"), f"{reason}: give fixed or budget"


def _idle_offload(
    offload: dict[str, Any], trainer: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    engine, accelerator = offload.get("engine", "auto"), trainer.get("accelerator", "auto")
    devices = trainer.get("devices", 1)
    if engine in ("cuda", "cudagraph") and accelerator == "cpu":
        yield (
            ("offload", "engine"),
            f"{engine} runs on a GPU, and trainer.accelerator is cpu: give auto or threads",
        )
    if engine == "threads" and accelerator == "gpu":
        yield (
            ("offload", "engine"),
            "threads runs on the CPU, and trainer.accelerator is gpu: give auto, cuda or cudagraph",
        )
    if accelerator == "gpu" and type(devices) is int and devices > 1:
        yield (
            ("trainer", "devices"),
            f"{devices}, but offload runs on one GPU so far: give 1, or no offload",
        )


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The complete configuration as plain data: what config.yaml and run.json hold."""
    return config.model_dump(mode="json")
