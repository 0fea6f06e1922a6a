"""Ways to keep a number that a training step reads, each with a way to change it later."""

import array
import collections
import copy
import dataclasses
import os
import types
import weakref

import numpy as np
import torch
from support import watched_settings
from support.watched_kept import (
    LOCAL,
    LOSSES,
    NESTED,
    TABLE,
    VARIABLE,
    Config,
    Helper,
    Lazy,
    Module,
    Namespace,
    Phase,
    Slots,
    Way,
    Weigher,
    change_settings,
    closure,
    default_dict,
    dispatched,
    double,
    from_environment,
    from_globals,
    global_beta,
    global_hook,
    hooked,
    imports_inside,
    imports_name_inside,
    keeps,
    no_step,
    nothing,
    partial_of,
    patched_forward,
    registered,
    replaced_optimizers,
    restore_class,
    set_attribute,
    set_class,
    set_global,
    set_item,
    undo_global_hook,
    undo_registered,
    weighed,
)
from torch import nn

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
    "globals()": Way(nothing, from_globals, lambda _: set_global(0.25), lambda: set_global(0.5)),
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
