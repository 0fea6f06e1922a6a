"""The fakes of a trace, most of which come from a table of earlier results.

    op over shapes that were seen before      its result is looked up
    anything new                              torch computes the result from the shapes, in Python

The table is torch's own, and one for all traces of the process: a step is traced several times, and
only the first time is slow. It forgets which results of an op share memory, and knows no more of a
call than its arguments. So an op with several results is only looked up if it is known that each of
them has memory of its own: an LSTM's workspace, for example, depends on whether autograd is on. An
op whose result is no tensor is never looked up: it may choose a kernel by torch's settings.
"""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from offload.torch_seams import FakeTensorMode, OpOverload, schema_of

MOST = 20_000
"""So many results may be in the table when a trace begins, or it begins with none."""
APART = frozenset(
    {"native_batch_norm", "native_batch_norm_backward", "var_mean", "nll_loss_forward"}
    | {"native_layer_norm", "native_layer_norm_backward", "convolution_backward"}
    | {"native_group_norm", "native_group_norm_backward", "nll_loss2d_forward"}
    | {"max_pool2d_with_indices"}
)
"""Ops with several results, each of which has memory of its own, whatever the arguments are."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Fakes(FakeTensorMode):
    """Makes the fake tensors of one trace."""

    def __init__(self) -> None:
        # Without `export` it would read a user's single numbers for `.item()` and bake them in.
        super().__init__(export=True)
        if FakeTensorMode.cache_info().size > MOST:
            FakeTensorMode.cache_clear()

    @cached_property
    def avoid_device_init(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether this machine lacks a GPU. Torch would look for one at every op, which takes a
        tenth of the trace where there is none."""
        return super().avoid_device_init

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NOTHING,
    ) -> Any:
        """Make the result of one op. Torch calls this, also for the parts of an op that it takes
        apart."""
        before, self.cache_enabled = self.cache_enabled, _is_looked_up(func)
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = before


@cache
def _is_looked_up(func: Any) -> bool:
    """Whether the op's results may come from the table."""
    if not isinstance(func, OpOverload):
        return False
    schema = schema_of(func)
    if schema.name.split("::")[1] in APART:
        return True
    return [str(result.type) for result in schema.returns] == ["Tensor"]
