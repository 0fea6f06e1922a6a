"""Ways to keep a number that a training step reads, each with a way to change it later."""

import array
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
import watched_settings
from torch import nn

BETA = 0.5
TABLE = {"beta": 0.5}
NESTED: dict[str, Any] = {"loss": {"beta": 0.5}}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"now": torch.square}


class Phase(enum.Enum):
    WARM = 0.5
    COLD = 0.25


@dataclass
class Config:
    beta: float = 0.5
    more: Any = None


class Slots:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 0.5


class Namespace:
    beta = 0.5


class Lazy:
    def __init__(self) -> None:
        self.inner = {"beta": 0.5}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["inner"][name]
        except KeyError:
            raise AttributeError(name) from None


class Helper:
    def __init__(self) -> None:
        self.cfg = Config()

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.cfg.beta


class Module(L.LightningModule):
    """A step whose loss is weighed by `beta()`, wherever that comes from."""

    beta_of_class = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.0)
        self.prepare()

    def prepare(self) -> None:
        pass

    def beta(self) -> Any:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.drop(self.layer(x)), y)
        return loss * self.beta()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@dataclass(frozen=True)
class Way:
    prepare: Callable[[Any], None]
    beta: Callable[[Any], Any]
    change: Callable[[Any], Any]
    undo: Callable[[], Any] = lambda: None

    def module(self) -> Module:
        way = self

        class Kept(Module):
            def prepare(self) -> None:
                way.prepare(self)

            def beta(self) -> Any:
                return way.beta(self)

        return Kept()


def nothing(_: Any) -> None:
    pass


def keeps(**values: Any) -> Callable[[Any], None]:
    """Sets these attributes, each made by a call."""

    def prepare(module: Any) -> None:
        for name, make in values.items():
            setattr(module, name, make())

    return prepare


def global_beta(_: Any) -> float:
    return BETA


def set_global(value: float) -> None:
    global BETA
    BETA = value


def default_dict(module: Any, table: dict[str, float] = TABLE) -> float:
    return table["beta"]


def from_environment(_: Any) -> float:
    return float(os.environ.get("WATCHED_BETA", "0.5"))


def closure() -> Way:
    beta = 0.5

    def read(_: Any) -> float:
        return beta

    def change(_: Any, value: float = 0.25) -> None:
        nonlocal beta
        beta = value

    return Way(nothing, read, change, lambda: change(None, 0.5))


def patched_forward(module: Any) -> None:
    before = module.layer.forward
    module.layer.forward = lambda x: before(x) * 0.5


def no_step(closure: Callable[[], Any]) -> Any:
    return closure()


def replaced_optimizers(module: Any) -> None:
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), 0.3)]


def weighed(module: Any) -> Any:
    return module.cfg.beta


def set_attribute(path: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, module), name, value)

    return change


def hooked(module: Any) -> None:
    module.layer.register_forward_hook(lambda _m, _i, out: out * 0.5)


def set_item(get: Callable[[Any], Any], key: Any, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        get(module)[key] = value

    return change


def set_class(kind: Any, name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: setattr(kind, name, value)


def restore_class(kind: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(kind, name, value)


def partial_of(module: Any) -> None:
    module.weigh = functools.partial(lambda x, beta: x * beta, beta=0.5)


def double(loss: Any) -> Any:
    return loss * 2


LOCAL = threading.local()
LOCAL.beta = 0.5
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("beta", default=0.5)


@functools.singledispatch
def dispatched(_: Any) -> float:
    return 0.5


def registered(_: Any) -> None:
    dispatched.register(float, lambda _: 0.25)


def undo_registered() -> None:
    dispatched.register(float, lambda _: 0.5)


def imports_inside(_: Any) -> float:
    import watched_settings

    return watched_settings.BETA


def imports_name_inside(_: Any) -> float:
    from watched_settings import BETA

    return BETA


def change_settings(value: float) -> None:
    watched_settings.BETA = value


def global_hook(_: Any) -> None:
    HOOKS.append(
        nn.modules.module.register_module_forward_hook(
            lambda module, _, out: out * 0.5 if isinstance(module, nn.Linear) else None
        )
    )


def undo_global_hook() -> None:
    HOOKS.pop().remove()


HOOKS: list[Any] = []


class Weigher:
    def __call__(self, loss: Any) -> Any:
        return loss * 0.5


WAYS: dict[str, Way] = {
    "type(self)": Way(
        nothing,
        lambda m: type(m).beta_of_class,
        set_class(Module, "beta_of_class", 0.25),
        restore_class(Module, "beta_of_class", 0.5),
    ),
    "a copy of an object": Way(
        keeps(cfg=Config), lambda m: copy.copy(m.cfg).beta, set_attribute("cfg.beta", 0.25)
    ),
    "a deep copy of an object": Way(
        keeps(cfg=Config), lambda m: copy.deepcopy(m.cfg).beta, set_attribute("cfg.beta", 0.25)
    ),
    "a call of an object": Way(
        keeps(weigh=Weigher),
        lambda m: m.weigh(1.0),
        set_class(Weigher, "__call__", lambda self, loss: loss * 0.25),
        restore_class(Weigher, "__call__", Weigher.__call__),
    ),
    "an attribute of a function": Way(
        lambda m: setattr(double, "beta", 0.5),
        lambda m: double(double.beta),  # type: ignore[attr-defined]
        lambda m: setattr(double, "beta", 0.25),
    ),
    "an attribute of a parameter": Way(
        lambda m: setattr(m.layer.weight, "beta", 0.5),
        lambda m: m.layer.weight.beta,
        lambda m: setattr(m.layer.weight, "beta", 0.25),
    ),
    "an array of Python": Way(
        keeps(cfg=lambda: array.array("d", [0.5])),
        lambda m: m.cfg[0],
        set_item(lambda m: m.cfg, 0, 0.25),
    ),
    "threading.local": Way(
        nothing,
        lambda m: LOCAL.beta,
        lambda _: setattr(LOCAL, "beta", 0.25),
        lambda: setattr(LOCAL, "beta", 0.5),
    ),
    "a context variable": Way(
        nothing, lambda m: VARIABLE.get(), lambda _: VARIABLE.set(0.25), lambda: VARIABLE.set(0.5)
    ),
    "singledispatch": Way(nothing, lambda m: dispatched(1.0), registered, undo_registered),
    "a module of settings": Way(
        nothing,
        lambda m: watched_settings.BETA,
        lambda _: change_settings(0.25),
        lambda: change_settings(0.5),
    ),
    "a module that the step imports": Way(
        nothing, imports_inside, lambda _: change_settings(0.25), lambda: change_settings(0.5)
    ),
    "a name that the step imports": Way(
        nothing, imports_name_inside, lambda _: change_settings(0.25), lambda: change_settings(0.5)
    ),
    "globals()": Way(
        nothing, lambda m: globals()["BETA"], lambda _: set_global(0.25), lambda: set_global(0.5)
    ),
    "a callback's attribute": Way(
        nothing,
        lambda m: getattr(m.trainer.callbacks[0], "beta", 0.5),
        lambda m: setattr(m.trainer.callbacks[0], "beta", 0.25),
    ),
    "a hook of all modules": Way(nothing, lambda m: 1.0, global_hook, undo_global_hook),
    "an attribute": Way(keeps(b=lambda: 0.5), lambda m: m.b, set_attribute("b", 0.25)),
    "an attribute of a submodule": Way(nothing, lambda m: 1.0, set_attribute("drop.p", 0.5)),
    "a class attribute, set on the instance": Way(
        nothing, lambda m: m.beta_of_class, set_attribute("beta_of_class", 0.25)
    ),
    "a class attribute": Way(
        nothing,
        lambda m: m.beta_of_class,
        set_class(Module, "beta_of_class", 0.25),
        restore_class(Module, "beta_of_class", 0.5),
    ),
    "a class as a namespace": Way(
        nothing,
        lambda m: Namespace.beta,
        set_class(Namespace, "beta", 0.25),
        restore_class(Namespace, "beta", 0.5),
    ),
    "a dataclass": Way(keeps(cfg=Config), weighed, set_attribute("cfg.beta", 0.25)),
    "a dataclass, replaced": Way(
        keeps(cfg=Config), weighed, lambda m: setattr(m, "cfg", dataclasses.replace(m.cfg, beta=2))
    ),
    "a namespace": Way(
        keeps(cfg=lambda: types.SimpleNamespace(beta=0.5)), weighed, set_attribute("cfg.beta", 0.25)
    ),
    "slots": Way(keeps(cfg=Slots), weighed, set_attribute("cfg.beta", 0.25)),
    "an object in an object": Way(
        keeps(cfg=lambda: Config(more=Config())),
        lambda m: m.cfg.more.beta,
        set_attribute("cfg.more.beta", 0.25),
    ),
    "an object with __getattr__": Way(
        keeps(cfg=Lazy), weighed, set_item(lambda m: m.cfg.inner, "beta", 0.25)
    ),
    "vars()": Way(keeps(cfg=Config), lambda m: vars(m.cfg)["beta"], set_attribute("cfg.beta", 2)),
    "a dict": Way(
        keeps(cfg=lambda: {"beta": 0.5}),
        lambda m: m.cfg["beta"],
        set_item(lambda m: m.cfg, "beta", 2),
    ),
    "a nested dict": Way(
        keeps(cfg=lambda: {"a": {"b": {"beta": 0.5}}}),
        lambda m: m.cfg["a"]["b"]["beta"],
        set_item(lambda m: m.cfg["a"]["b"], "beta", 0.25),
    ),
    "hparams": Way(
        lambda m: m.save_hyperparameters({"cfg": {"loss": {"beta": 0.5}}}),
        lambda m: m.hparams["cfg"]["loss"]["beta"],
        set_item(lambda m: m.hparams["cfg"]["loss"], "beta", 0.25),
    ),
    "a tuple of tuples": Way(
        keeps(cfg=lambda: ((0.5, 1), 2)),
        lambda m: m.cfg[0][0],
        set_attribute("cfg", ((0.25, 1), 2)),
    ),
    "a long list": Way(
        keeps(cfg=lambda: [0.5] * 10_000),
        lambda m: m.cfg[9_999],
        set_item(lambda m: m.cfg, 9_999, 0.25),
    ),
    "a deque": Way(
        keeps(cfg=lambda: collections.deque([0.5])),
        lambda m: m.cfg[0],
        set_item(lambda m: m.cfg, 0, 2),
    ),
    "a set": Way(
        keeps(cfg=lambda: {1}), lambda m: 2.0 if 2 in m.cfg else 0.5, lambda m: m.cfg.add(2)
    ),
    "an object in a list": Way(
        keeps(cfg=lambda: [Config()]),
        lambda m: m.cfg[0].beta,
        lambda m: setattr(m.cfg[0], "beta", 2),
    ),
    "an enum": Way(
        keeps(phase=lambda: Phase.WARM), lambda m: m.phase.value, set_attribute("phase", Phase.COLD)
    ),
    "a number of numpy": Way(
        keeps(b=lambda: np.float32(0.5)), lambda m: float(m.b), set_attribute("b", np.float32(0.25))
    ),
    "an array": Way(
        keeps(b=lambda: np.array([0.5, 1.0])),
        lambda m: float(m.b[0]),
        set_item(lambda m: m.b, 0, 0.25),
    ),
    "a function": Way(
        keeps(f=lambda: torch.square),
        lambda m: m.f(m.layer.bias).sum(),
        set_attribute("f", torch.exp),
    ),
    "a function in a global dict": Way(
        nothing,
        lambda m: LOSSES["now"](m.layer.bias).sum(),
        lambda _: LOSSES.update(now=torch.exp),
        lambda: LOSSES.update(now=torch.square),
    ),
    "partial": Way(
        partial_of, lambda m: m.weigh(1.0), lambda m: m.weigh.keywords.update(beta=0.25)
    ),
    "a helper's method": Way(
        keeps(helper=Helper), lambda m: m.helper.weigh(1.0), set_attribute("helper.cfg.beta", 0.25)
    ),
    "a method patched on its class": Way(
        keeps(helper=Helper),
        lambda m: m.helper.weigh(1.0),
        set_class(Helper, "weigh", lambda self, loss: loss * 2),
        restore_class(Helper, "weigh", Helper.weigh),
    ),
    "a weak reference": Way(
        keeps(kept=Config),
        lambda m: getattr(weakref.ref(m.kept)(), "beta"),  # noqa: B009
        set_attribute("kept.beta", 0.25),
    ),
    "a global": Way(nothing, global_beta, lambda _: set_global(0.25), lambda: set_global(0.5)),
    "a global dict": Way(
        nothing,
        lambda m: TABLE["beta"],
        lambda _: TABLE.update(beta=0.25),
        lambda: TABLE.update(beta=0.5),
    ),
    "a dict in a global dict": Way(
        nothing,
        lambda m: NESTED["loss"]["beta"],
        lambda _: NESTED["loss"].update(beta=0.25),
        lambda: NESTED["loss"].update(beta=0.5),
    ),
    "a default argument": Way(
        nothing, default_dict, lambda _: TABLE.update(beta=0.25), lambda: TABLE.update(beta=0.5)
    ),
    "a closure": closure(),
    "the environment": Way(
        nothing,
        from_environment,
        lambda _: os.environ.update(WATCHED_BETA="0.25"),
        lambda: os.environ.pop("WATCHED_BETA"),  # type: ignore[arg-type,return-value]
    ),
    "an attribute of the trainer": Way(
        nothing,
        lambda m: getattr(m.trainer, "beta", 0.5),
        lambda m: setattr(m.trainer, "beta", 0.25),
    ),
    "trainer.is_last_batch": Way(
        nothing, lambda m: 2.0 if m.trainer.is_last_batch else 1.0, lambda m: None
    ),
    "an optimizer's weight decay": Way(
        nothing,
        lambda m: 1.0 + m.trainer.optimizers[0].param_groups[0]["weight_decay"],
        lambda m: m.trainer.optimizers[0].param_groups[0].update(weight_decay=0.25),
    ),
    "momentum from 0": Way(
        nothing,
        lambda m: 1.0,
        lambda m: m.trainer.optimizers[0].param_groups[0].update(momentum=0.0),
    ),
    "optimizer.step patched": Way(
        nothing,
        lambda m: 1.0,
        lambda m: setattr(m.trainer.optimizers[0], "step", no_step),
    ),
    "trainer.optimizers replaced": Way(nothing, lambda m: 1.0, replaced_optimizers),
    "a forward hook": Way(nothing, lambda m: 1.0, hooked),
    "a patched forward": Way(nothing, lambda m: 1.0, patched_forward),
    "a submodule replaced": Way(nothing, lambda m: 1.0, lambda m: setattr(m, "drop", nn.ReLU())),
    "eval()": Way(lambda m: setattr(m.drop, "p", 0.5), lambda m: 1.0, lambda m: m.drop.eval()),
    "a frozen parameter": Way(nothing, lambda m: 1.0, lambda m: m.layer.bias.requires_grad_(False)),
    "the default dtype": Way(
        nothing,
        lambda m: float(torch.tensor(0.1).double() * 10),
        lambda _: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
}
