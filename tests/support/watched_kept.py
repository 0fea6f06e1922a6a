"""What keeps a number in the ways of watched_ways.py, and how it is changed there."""

import contextvars
import enum
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from support import watched_settings
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


def from_globals(_: Any) -> Any:
    return globals()["BETA"]


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
    from support import watched_settings

    return watched_settings.BETA


def imports_name_inside(_: Any) -> float:
    from support.watched_settings import BETA

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
