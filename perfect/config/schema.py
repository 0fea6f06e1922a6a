"""The schema of a run's YAML: which keys there are, what they mean and what their defaults are.

A key that a YAML leaves out takes the default written here; the run's own `config.yaml` has all
keys. A key without effect is an error.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from loaders.order.reuse import Mode
from perfect.config.elastic_schema import ElasticConfig
from perfect.config.fields import (
    AugmentConfig,
    Budget,
    Bytes,
    Count,
    Flag,
    JobDevices,
    Lengths,
    NamedOrOwn,
    Number,
    Rate,
    Section,
    Share,
    Size,
    Weight,
    changed,
    no_effect,
    unknown,
)
from perfect.method.schedule import Kind

MODEL_NAMES = (
    "resnet18", "vgg16", "mobilenetv2", "resnet8", "resnet8_stride2", "pilot", "resnet50",
)  # fmt: skip
LANGUAGE_MODEL_NAMES = (
    "gpt2_tiny", "gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl", "llama_tiny", "llama_7b",
)  # fmt: skip
TEXTS = ("wikitext2", "lines")


class LoraConfig(Section):
    rank: Count = 16  # The rows of each learned matrix.
    alpha: Rate = 16.0
    """The learned matrices are scaled by alpha / rank."""


class ModelConfig(NamedOrOwn):
    name: str | None = None  # A network of ours, such as resnet18 or gpt2_small.
    num_classes: Count | None = None
    """None: as many as the data set has. For a text, this is the vocabulary."""
    dropout: Share | None = None
    """None: 0.1. Only GPT-2 has dropout."""
    weights: str | None = None
    """A folder with a checkpoint as transformers saves it (None: random weights)."""
    lora: LoraConfig | None = None
    """Freezes the model, and learns small matrices beside those for Q, K, V and feed-forward."""

    @model_validator(mode="after")
    def _check_model(self) -> "ModelConfig":
        known = (*MODEL_NAMES, *LANGUAGE_MODEL_NAMES)
        if self.name is not None and self.name not in known:
            raise ValueError(unknown("model", self.name, known))
        idle = changed(self) & {"dropout", "weights", "lora"}
        if self.name in MODEL_NAMES and idle:
            raise ValueError(no_effect(idle, f"on {self.name}"))
        if self.name is not None and self.name.startswith("llama") and "dropout" in idle:
            raise ValueError(no_effect({"dropout"}, f"on {self.name}"))
        return self


class DataConfig(NamedOrOwn):
    name: Literal["cifar10", "imagefolder", "wikitext2", "lines"] | None = None
    """A data set that we can read."""
    root: str = "data"  # The folder of the data set.
    picture_size: Count | None = None
    """The side of the stored square. This key is for pictures of a folder only."""
    exif: bool = True
    """Whether pictures of a folder are turned as their EXIF says."""
    pixel_limit: Count | None = None
    """Pictures of a folder with more pixels are refused (None: PIL.Image.MAX_IMAGE_PIXELS)."""
    holdout: Annotated[int, Field(strict=True, ge=0)] = 0
    """So many training samples are set aside for curves and the plateau rule."""
    train_samples: Count | None = None
    """Only so many of the other samples are trained on (None: all)."""
    sequence: Count | None = None
    """The number of tokens in a sample; in one of lines, the most. This key and those below are for
    text only."""
    vocabulary: Annotated[int, Field(strict=True, ge=256)] | None = None
    """Only the first so many entries of the BPE vocabulary are used (None: all)."""
    evaluation_samples: Count | None = None
    """So many blocks of the validation text, and of the test text, are evaluated (None: all)."""
    test_text: Literal["tokens", "raw"] = "tokens"
    """With raw, the test text is used as it was written: no rare word is replaced by <unk>."""
    lengths: Lengths = "auto"
    """What batches of lines are padded to, in ascending order up to sequence. auto: a few lengths
    that fit the training texts."""

    @model_validator(mode="after")
    def _check_keys_of_kind(self) -> "DataConfig":
        if self.name == "imagefolder" and self.picture_size is None:
            raise ValueError("imagefolder needs picture_size, the side of the stored square")
        if self.name == "cifar10" and self.picture_size is not None:
            raise ValueError("picture_size has no effect: CIFAR-10 pictures have 32x32 pixels")
        if self.name is None:
            return self
        of_text = {"sequence", "vocabulary", "evaluation_samples", "test_text", "lengths"}
        of_files = {"exif", "pixel_limit"}
        idle = changed(self) & {
            "wikitext2": {"picture_size", "holdout", "lengths", *of_files},
            "lines": {"picture_size", "holdout", "test_text", *of_files},
            "cifar10": {*of_text, *of_files},
        }.get(self.name, of_text)
        if idle:
            own_text = ", which has a validation text (see evaluation_samples)"
            why = own_text if "holdout" in idle else ""
            raise ValueError(no_effect(idle, f"on {self.name}{why}"))
        if self.name in TEXTS and self.sequence is None:
            raise ValueError(f"{self.name} needs sequence, the number of tokens in a sample")
        if self.lengths != "auto" and self.lengths[-1] != self.sequence:
            raise ValueError(
                f"lengths end with {self.lengths[-1]}, and samples have up to {self.sequence}"
                " tokens (sequence): end with that"
            )
        return self


class LoaderConfig(Section):
    batch_size: Count = 128  # Samples of a batch on each device; with elastic, on all peers.
    buffer_batches: Count = 12
    """The buffer holds so many batches (never less than one)."""
    mode: Mode = "rolling"
    """rolling mixes first and later serves; block fills the buffer, serves it R times, refills it;
    immediate repeats each batch R times in a row."""
    workers: Literal["auto"] | Count = "auto"
    """So many workers decode (auto: one for each CPU that this process may use)."""
    worker_kind: Literal["auto", "thread", "process"] = "auto"
    """auto: threads where reading is known to be safe in them, else processes. process also runs
    the steps of augment that have a class_path."""
    drop_last: Flag = False  # Leaves out a last, smaller batch.
    buffer_bytes: Bytes | None = None
    """The buffer and the batches under way take at most so many bytes (8GiB, or a number)."""
    backend: Literal["native", "dali"] = "native"
    """The library that decodes the pictures of a folder."""
    cache: Literal["ram", "disk"] | None = None
    """Keeps decoded training samples for later passes (ram), or also for later runs (disk)."""
    cache_bytes: Bytes | None = None
    """The cache takes at most so many bytes: in RAM per process, on disk for all processes."""
    cache_dir: str | None = None  # The folder of a cache on disk.
    cache_key: str | None = None
    """A word that names the version of what a cache on disk cannot compare in your own data set."""
    on_error: Literal["raise", "skip"] = "raise"
    """With skip, another sample replaces one that cannot be read. Evaluation always raises."""

    @field_validator("backend", mode="before")
    @classmethod
    def _refuse_ffcv(cls, given: object) -> object:
        if given == "ffcv":
            raise ValueError(
                "ffcv reads .beton files, which a YAML cannot name: give native or dali, or use"
                ' ReuseLoader("FILE.beton", backend="ffcv") in a program of your own'
            )
        return given

    @model_validator(mode="after")
    def _check_cache(self) -> "LoaderConfig":
        if self.cache is None:
            idle = changed(self) & {"cache_bytes", "cache_dir", "cache_key"}
            if idle:
                raise ValueError(no_effect(idle, "without cache"))
            return self
        if self.cache_bytes is None:
            raise ValueError(f"cache: {self.cache} needs cache_bytes, the most that it may take")
        if self.cache == "disk" and self.cache_dir is None:
            raise ValueError("cache: disk needs cache_dir, the folder to keep it in")
        if self.cache == "ram" and (idle := changed(self) & {"cache_dir", "cache_key"}):
            raise ValueError(no_effect(idle, "on cache: ram, which has no folder"))
        return self


class TaskConfig(Section):
    label_smoothing: Share = 0.0  # The share of the target that goes to all classes alike.


class OptimizerConfig(Section):
    name: Literal["sgd", "adamw"] = "sgd"  # torch.optim.SGD or AdamW.
    lr: Rate = 0.1  # The learning rate of phases without a curve.
    momentum: Share = 0.9  # The share of the last update that goes on, for sgd only.
    nesterov: Flag = False  # Nesterov's momentum, for sgd only.
    weight_decay: Weight = 5e-4  # How fast weights shrink; a phase may replace it.
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.999])
    """Only adamw has them: how slowly its averages of gradients and of their squares decay."""

    @model_validator(mode="after")
    def _check_keys_of_optimizer(self) -> "OptimizerConfig":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0: raise momentum, or remove nesterov")
        idle = changed(self) & {"momentum", "nesterov"}
        if self.name == "adamw" and idle:
            raise ValueError(no_effect(idle, "on adamw"))
        if self.name == "sgd" and "betas" in changed(self):
            raise ValueError(no_effect({"betas"}, "on sgd, which has momentum"))
        return self


class ScheduleConfig(Section):
    kind: Kind  # The shape of the learning rate's curve over the phase.
    lr: Rate  # The highest rate of the curve.
    final: Weight = 0.0  # The rate at the end of cosine, linear and onecycle.
    warmup: Share = 0.0  # The rate rises from 0 for this share of the phase.
    ramp: Annotated[Number, Field(gt=0, lt=1)] = 0.3  # A onecycle rises for this share.
    part: Annotated[list[Number], Field(min_length=2, max_length=2)] = Field(default=[0.0, 1.0])
    """The phase walks through this window of the curve, so two phases can share one."""

    @model_validator(mode="after")
    def _check_keys_of_curve(self) -> "ScheduleConfig":
        given = changed(self)
        if self.kind == "constant" and "final" in given:
            raise ValueError(no_effect({"final"}, "on constant, which ends at the rate lr"))
        if self.kind != "onecycle" and "ramp" in given:
            raise ValueError(no_effect({"ramp"}, f"on {self.kind}, which rises during warmup"))
        if self.kind == "onecycle" and "warmup" in given:
            raise ValueError(no_effect({"warmup"}, "on onecycle, which rises during ramp"))
        if not 0 <= self.part[0] < self.part[1] <= 1:
            raise ValueError(f"part must be [begin, end], 0 <= begin < end <= 1, not {self.part}")
        return self


class PhaseConfig(Section):
    name: str  # What the logs and the report call it.
    passes: Count | None = None  # The length in passes: each sample is decoded once in each.
    steps: Count | None = None  # The length in optimizer steps, in place of passes.
    reuse: Count = 1  # A decoded sample is served so many times in a pass.
    reaugment: Flag = True  # With false, every serve repeats the first one's random draws.
    batch_size: Count | None = None  # None: loader.batch_size.
    lr: ScheduleConfig | None = None  # The curve of the learning rate (None: it stays as it is).
    weight_decay: Weight | None = None  # None: it stays as it is.
    ema: Flag = False  # Averages the weights, and validates the average.
    reset_optimizer: Flag = False  # The phase begins with an empty optimizer state.


class FixedSwitch(Section):
    rule: Literal["fixed"] = "fixed"  # Each phase lasts as long as its passes or steps say.


class BudgetSwitch(Section):
    rule: Literal["budget"]  # The lengths of both phases follow from the two keys below.
    fresh_passes: Rate  # The run decodes the data set so often.
    total: Rate  # The length of the run in epochs of served samples.


class PlateauSwitch(Section):
    """Switches to the last phase when the curve is flat. The latest time of the switch comes from
    the budget (fresh_passes and total) if there is one, and from the phases' passes otherwise."""

    rule: Literal["plateau"]  # The first phase ends where the curve is flat.
    fresh_passes: Rate | None = None  # As in budget.
    total: Rate | None = None  # As in budget.
    monitor: str = "val_accuracy"  # The accuracy (0 to 1) on held-out samples.
    window: Annotated[int, Field(strict=True, ge=3)] | None = None
    """The checks that a slope is taken over. None: max(12, 7.5 % of the epoch-equivalents)."""
    accuracy_slope: Rate = 0.10  # A gain of fewer points an epoch counts as flat.
    loss_slope: Rate = 0.015  # A smaller relative change of the loss an epoch counts as flat.
    hits: Count = 2  # The rule fires after so many flat checks in a row.
    earliest: Share = 0.25
    """The rule does not fire before this share of the run."""

    @model_validator(mode="after")
    def _check_budget(self) -> "PlateauSwitch":
        if (self.fresh_passes is None) != (self.total is None):
            missing = "fresh_passes" if self.fresh_passes is None else "total"
            raise ValueError(f"a budget needs both fresh_passes and total: {missing} is missing")
        return self


SwitchConfig = Annotated[FixedSwitch | BudgetSwitch | PlateauSwitch, Field(discriminator="rule")]


class EmaConfig(Section):
    decay: Annotated[Number, Field(gt=0, lt=1)] = 0.999
    """The share of itself that the average keeps at each step."""


class TrainerConfig(Section):
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  # As in Lightning's Trainer.
    devices: Count = 1  # The number of devices.
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """As in Lightning's Trainer."""
    validate_every: Rate = 1.0
    """The epoch-equivalents between two validations on the hold-out."""
    accumulate: Count = 1  # So many batches make one optimizer step.
    gradient_clip: Rate | None = None
    """The largest norm of all gradients (None: they are not clipped)."""
    threads: Count | None = None
    """The number of torch's CPU threads (None: torch chooses it)."""


class OffloadConfig(Section):
    """The arguments of `OffloadStrategy`. They do not change the results of a run, so a run may be
    resumed with another section, or without one."""

    budget: Budget | None = None
    """The bytes of the device that a step may take (8GiB), or the share of what it needs (80%).
    None: there is no limit."""
    host_budget: Size | None = None
    """The bytes of host memory that a step may take (None: there is no limit)."""
    recompute: Literal["auto", "never"] = "auto"
    """auto may compute activations again; never keeps or copies them."""
    optimizer: Literal["auto", "device", "host"] = "auto"
    """Where updates run; auto: where it is faster, or the only way."""
    engine: Literal["auto", "threads", "cuda", "cudagraph"] = "auto"
    """Who runs the plan; auto is cuda on a GPU and threads on the CPU."""
    verify: Flag = True  # Each plan is proved free of races before it runs.
    plan_cache: str | None = None
    """A folder for plans and measurements, so that the next start of this run does not search and
    measure again. None: nothing is kept."""
    host_dir: str | None = None
    """A folder for files that are the memory of the host, on the CPU. None: it is RAM."""
    devices: JobDevices = 1
    """Over how many devices one process spreads each step. Each of them has the budget. A job of a
    fleet may have a range (1..4)."""
    micro_batches: Count = 1
    """Each batch is split into so many, which several devices work on at once."""

    @model_validator(mode="after")
    def _check_keys_of_budget(self) -> "OffloadConfig":
        idle = changed(self) & {"recompute", "host_budget", "host_dir", "optimizer"}
        if self.optimizer == "host":
            idle -= {"host_budget", "host_dir", "optimizer"}  # the optimizer's state is on the host
        if self.budget is None and idle:
            why = "without a budget, as everything stays on the device"
            raise ValueError(no_effect(idle, why))
        return self


class CheckpointConfig(Section):
    every_steps: Count = 500  # last.ckpt is written after each so many optimizer steps.


class RunConfig(Section):
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0
    """The seed of all random numbers of the run."""
    model: ModelConfig  # The network.
    data: DataConfig  # The data set.
    augment: list[AugmentConfig] = Field(default=[])
    """The steps that change a picture at each serve, in this order."""
    loader: LoaderConfig = LoaderConfig()  # How samples are decoded, buffered and batched.
    task: TaskConfig = TaskConfig()  # The loss.
    optimizer: OptimizerConfig = OptimizerConfig()  # The optimizer and its settings.
    phases: Annotated[list[PhaseConfig], Field(min_length=1)]  # The run's phases, in order.
    switch: SwitchConfig = FixedSwitch()  # What decides when a phase ends.
    ema: EmaConfig = EmaConfig()  # The averaged weights of phases with ema.
    trainer: TrainerConfig = TrainerConfig()  # Devices, precision and validation.
    offload: OffloadConfig | None = None
    """None: plain Lightning runs the whole step on the device."""
    elastic: ElasticConfig | None = None
    """None: this node trains alone."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = Field(default=[])
    """Loggers besides metrics.csv, which is always written. csv: Lightning's own CSV files, in
    lightning_csv/. tensorboard: event files in tensorboard/, for `tensorboard --logdir RUN_DIR`.
    wandb: a run on Weights & Biases, in the project that WANDB_PROJECT names."""
    checkpoint: CheckpointConfig = CheckpointConfig()  # How often the run is saved.


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Return the complete configuration as plain data, as config.yaml and run.json contain it."""
    return config.model_dump(mode="json")
