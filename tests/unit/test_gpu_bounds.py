"""benchmarks/gpu/bounds.py against numbers worked out by hand."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu.bounds as module

    return module


def seven_billion(bounds, rows: int, **more):
    settings = {"kind": "lora", "checkpointed": True, **more}
    return bounds.Shape(6.6e9, 13.2e9, 32, 4096, rows, 1024, **settings)


def test_a_streamed_weight_is_hidden_from_as_many_tokens_on_as_the_rates_say(bounds) -> None:
    machine = bounds.Machine(flops=450e12, h2d=55e9, d2h=55e9, host=1e12)
    assert bounds.hiding_tokens(machine) == pytest.approx(8182, abs=1)
    few = bounds.limit(seven_billion(bounds, 4), machine, 0.0)
    many = bounds.limit(seven_billion(bounds, 16), machine, 0.0)
    assert few.binds == "copies"
    assert few.seconds > 1.2 * few.compute
    assert many.binds == "compute"
    assert many.seconds == pytest.approx(many.compute)


def test_what_is_resident_is_not_copied(bounds) -> None:
    machine = bounds.Machine(flops=450e12, h2d=55e9, d2h=55e9, host=1e12)
    shape = seven_billion(bounds, 4)
    assert bounds.limit(shape, machine, 1.0).copies == 0
    half, none = bounds.limit(shape, machine, 0.5), bounds.limit(shape, machine, 0.0)
    assert 2 * half.copies == pytest.approx(none.copies)
    # Forwards all of it, backwards all but one layer of 32: 13.2 GB * (1 + 31/32) / 55 GB/s.
    assert none.copies == pytest.approx(0.4725, rel=1e-3)


def test_work_is_that_of_the_kinds_of_training(bounds) -> None:
    full = seven_billion(bounds, 8, kind="full", checkpointed=False)
    lora = seven_billion(bounds, 8, checkpointed=False)
    prefill = seven_billion(bounds, 8, kind="prefill", checkpointed=False)
    # 2 * 6.6e9 * 8192 and 2 * 1024 * 4096 * 32 * 8192.
    linear, attention = 1.0813e14, 2.199e12
    assert sum(bounds.work_of(prefill)) == pytest.approx(linear + attention, rel=1e-3)
    assert sum(bounds.work_of(lora)) == pytest.approx(2 * linear + 3.5 * attention, rel=1e-3)
    assert sum(bounds.work_of(full)) == pytest.approx(3 * linear + 3.5 * attention, rel=1e-3)


def test_updates_on_the_host_can_be_what_binds(bounds) -> None:
    machine = bounds.Machine(flops=450e12, h2d=55e9, d2h=55e9, host=100e9)
    shape = bounds.Shape(
        1.5e9, 3.1e9, 48, 1600, 8, 1024, kind="full", host_update_bytes=28 * 1.557e9
    )  # fmt: skip
    found = bounds.limit(shape, machine, 0.0)
    assert found.binds == "host"
    assert found.seconds == pytest.approx((28 * 1.557e9 + 2 * 3.1e9) / 100e9)
