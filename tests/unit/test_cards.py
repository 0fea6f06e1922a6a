"""Card files are strict, and prices follow from sizes and rates."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from offload.estimating.card import (
    CARDS,
    CardError,
    card_names,
    read_card,
    share_at,
)
from offload.estimating.operator_class import OperatorClass, Work, part_of, work_of
from offload.estimating.pricing import costs_of, price_tasks, price_work, seconds_of
from offload.graph.builder import GraphBuilder
from offload.program.kernels import Call, Value

aten = torch.ops.aten


def value(b: int, *size: int, dtype: torch.dtype = torch.float32) -> Value:
    return Value(b, dtype, size, torch.empty(size, device="meta").stride())


def product(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    a, b, out = (
        value(0, m, k, dtype=dtype),
        value(1, k, n, dtype=dtype),
        value(2, m, n, dtype=dtype),
    )
    return Call(aten.mm.default, (a, b), outputs=(out,))


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", card_names())
def test_every_shipped_file_is_valid_and_small(name: str) -> None:
    card = read_card(name)
    assert card.name == name
    assert (CARDS / f"{name}.json").stat().st_size < 4000
    assert {"products", "memory_rate", "memory_bytes", "links"} <= {*card.where}
    assert card.is_measured == (card.error is not None)


def test_the_error_bar_is_that_of_the_worst_check_step() -> None:
    error = read_card("h200").error
    assert error is not None
    assert error == pytest.approx(0.042, abs=0.001)


def set_at(path: str, new: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *inner, last = path.split(".")
        for key in inner:
            data = data[key]
        data[last] = new

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(path)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("speed", set_at("speed", 3)),
        ("links.up", set_at("links.up", 3)),
        ("l2_bytes", drop("l2_bytes")),
        ("checks.0.measured", set_at("checks", [{"name": "a", "predicted": 1.0}])),
        ("memory_rate", set_at("memory_rate", "fast")),
        ("memory_rate", set_at("memory_rate", True)),
        ("memory_rate", set_at("memory_rate", -1.0)),
        ("memory_rate", set_at("memory_rate", float("nan"))),
        ("memory_rate", set_at("memory_rate", 1e30)),
        ("memory_bytes", set_at("memory_bytes", 1.5)),
        ("source", set_at("source", "guessed")),
        ("products", set_at("products", {"int3": 1.0})),
        ("products", set_at("products", {})),
        ("products.bfloat16", set_at("products.bfloat16", 0)),
        ("flops_shares", set_at("flops_shares", {"magic": 0.5})),
        ("bytes_shares.norm", set_at("bytes_shares.norm", [[8, 0.1], [4, 0.2]])),
        ("bytes_shares.norm", set_at("bytes_shares.norm", [[8]])),
        ("flops_shares.product", set_at("flops_shares.product", 1e4)),
        ("context_bytes", set_at("context_bytes", 1 << 50)),
        ("links.shared", set_at("links.shared", 1.5)),
        ("where", set_at("where", {"luck": "yes"})),
        ("checks", set_at("checks", [])),
        ("versions", set_at("versions", {})),
        ("checks", set_at("checks", 3)),
        ("links", set_at("links", [])),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, key: str, change: Callable[[dict[str, Any]], None]
) -> None:
    data = json.loads((CARDS / "h200.json").read_text(encoding="utf-8"))
    change(data)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CardError) as refused:
        read_card(path)
    first = str(refused.value).splitlines()[0]
    assert first.startswith(f"{path}: ")
    assert key in first


@pytest.mark.parametrize("text", ['{"name": "a"', '{"name": "a", "name": "b"}', "\x00"])
def test_a_torn_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "torn.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CardError, match=r"torn\.json"):
        read_card(path)


def test_a_wrong_name_is_answered_with_the_names() -> None:
    with pytest.raises(CardError, match=r"Did you mean rtx4090\?.* a100-40, .*rtx5090") as refused:
        read_card("rtx409")
    assert "'rtx409'" in str(refused.value)


def test_remarks_tell_of_another_torch() -> None:
    card = read_card("h200")
    [other] = card.remarks("9.9")
    assert "torch 2.11.0+cu130, and this is 9.9" in other
    assert card.remarks("2.11.0+cu130") == []
    assert "at least" in read_card("h100").remarks("9.9")[0]


# ---- work ---------------------------------------------------------------------------------------


def test_a_product_has_its_operations_and_bytes() -> None:
    assert work_of(product(128, 256, 512)) == Work(
        "product", 2.0 * 128 * 256 * 512, 2 * (128 * 256 + 256 * 512 + 128 * 512), "bfloat16"
    )
    assert work_of(product(128, 256, 513)).kind == "odd_product"
    assert work_of(product(128, 16, 512)).kind == "thin_product"


def test_operations_of_other_products() -> None:
    batch = Call(
        aten.bmm.default, (value(0, 3, 64, 80), value(1, 3, 80, 96)), outputs=(value(2, 3, 64, 96),)
    )
    bias = Call(
        aten.addmm.default,
        (value(3, 96), value(0, 64, 80), value(1, 80, 96)),
        outputs=(value(2, 64, 96),),
    )
    linear = Call(
        aten.linear.default,
        (value(0, 3, 64, 80), value(1, 96, 80), value(3, 96)),
        outputs=(value(2, 3, 64, 96),),
    )
    one = 2.0 * 64 * 80 * 96
    assert [work_of(call).flops for call in (batch, bias, linear)] == [3 * one, one, 3 * one]


def test_operations_of_a_convolution_forwards_and_backwards() -> None:
    x, w, y = value(0, 2, 8, 16, 16), value(1, 32, 4, 3, 3), value(2, 2, 32, 14, 14)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    forward = Call(aten.convolution.default, (x, w, None, *rest), outputs=(y,))
    flops = 2.0 * 2 * 14 * 14 * 32 * 4 * 9
    assert work_of(forward).flops == flops
    for mask, times in (([True, True, True], 2), ([False, True, False], 1)):
        backward = Call(
            aten.convolution_backward.default, (y, x, w, [32], *rest, mask), outputs=(x, w, None)
        )
        assert work_of(backward).kind == "convolution_backward"
        assert work_of(backward).flops == times * flops


def test_operations_of_attention() -> None:
    q, k = value(0, 2, 4, 128, 32), value(1, 2, 4, 256, 32)
    whole = 4.0 * 2 * 4 * 128 * 256 * 32
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
    forward = Call(on_cpu.default, (q, k, k), outputs=(q,))
    causal = replace(forward, args=(q, k, k, 0.0, True))
    on_gpu = Call(aten._scaled_dot_product_flash_attention.default, (q, k, k, 0.0, True))
    assert [work_of(c).flops for c in (forward, causal, on_gpu)] == [whole, whole / 2, whole / 2]
    backward = Call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (q, q, k, k, q, q, 0.0, False),
    )
    assert work_of(backward).flops == 2.5 * whole


def test_operations_of_an_lstm() -> None:
    x, h = value(0, 16, 8, 64), value(1, 8, 128)
    weights = value(2, 512, 64), value(3, 512, 128), value(4, 512), value(5, 512)
    call = Call(aten.mkldnn_rnn_layer.default, (x, *weights, h, h, False, [], 2, 128, 1))
    assert work_of(call).flops == 2.0 * 16 * 8 * 512 * (64 + 128)
    assert work_of(call).kind == "recurrent"


def test_a_view_counts_its_part_and_an_expanded_dimension_once() -> None:
    assert part_of(Value(0, torch.float32, (4, 8), (100, 1), 7)) == 4 * 8 * 4
    assert part_of(Value(0, torch.float32, (1000, 8), (0, 1))) == 8 * 4
    assert part_of(Value(0, torch.float32, (0, 8), (8, 1))) == 0


def test_what_is_changed_in_place_counts_twice() -> None:
    a, b = value(0, 100), value(1, 100)
    assert work_of(Call(aten.add_.Tensor, (a, b))).nbytes == 1200
    update = Call(aten._foreach_add_.List, ([a, b], [b, a]))
    assert work_of(update) == Work("optimizer", 0.0, 6 * 400, "float32")


def test_an_embedding_reads_what_it_writes() -> None:
    ids = value(1, 5, dtype=torch.int64)
    call = Call(aten.embedding.default, (value(0, 50000, 16), ids), outputs=(value(2, 5, 16),))
    assert work_of(call) == Work("embedding", 0.0, 2 * 5 * 16 * 4 + 5 * 8, "float32")


# ---- prices -------------------------------------------------------------------------------------


def test_an_odd_width_is_slower_than_an_aligned_one() -> None:
    card = read_card("h200")
    aligned, odd = (price_work(work_of(product(4096, 4096, n)), card) for n in (4096, 4095))
    assert odd.seconds > 5 * aligned.seconds
    assert aligned.seconds == pytest.approx(2e-6 + 2.0 * 4096**3 / (0.741 * 989e12))


def test_a_sheet_is_never_slower_than_what_was_measured() -> None:
    measured = read_card("h200")
    sheet = measured.model_copy(update={"source": "sheet", "flops_shares": {}, "bytes_shares": {}})
    for kind in get_args(OperatorClass):
        for nbytes in (10**3, 10**7, 10**9):
            work = Work(kind, 50.0 * nbytes, nbytes, "bfloat16")
            assert seconds_of(work, sheet) <= seconds_of(work, measured)


def test_a_float32_convolution_on_a_gpu_uses_tf32_and_a_product_only_if_allowed() -> None:
    card = read_card("a100-40")
    assert card.flops_of("convolution_forward", "float32", 1e9) == 156e12
    assert card.flops_of("product", "float32", 1e9) == 19.5e12
    assert card.flops_of("product", "float32", 1e9, tf32=True) == 156e12
    with pytest.raises(CardError, match="no rate of int8 products"):
        card.flops_of("product", "int8", 1e9)


def test_a_share_lies_on_the_line_between_two_points() -> None:
    curve = ((10.0, 0.1), (1000.0, 0.4))
    assert [share_at(curve, size) for size in (1, 10, 1000, 1e9)] == [0.1, 0.1, 0.4, 0.4]
    assert share_at(curve, 100) == pytest.approx(0.2)


def test_tasks_are_priced_and_those_of_the_host_are_not() -> None:
    builder = GraphBuilder()
    for n in range(3):
        builder.buffer(f"b{n}", 64 * 64 * 2, "parameter")
    builder.task("mm", (0, 1), (2,), kernel=product(64, 64, 64))
    builder.task("again", (0, 1), (2,), kernel=product(64, 64, 64))
    builder.task("host", (0,), (0,), lane="host", traffic=100)
    card = read_card("rtx3090")
    first, again, host = price_tasks(builder.graph(), card).tasks
    assert first.seconds == again.seconds == price_work(work_of(product(64, 64, 64)), card).seconds
    assert first.flops == 2.0 * 64**3
    assert host.seconds is None


def test_a_convolution_has_a_workspace() -> None:
    x, w = value(0, 2, 8, 16, 16), value(1, 8, 8, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = Call(aten.convolution.default, (x, w, None, *rest), outputs=(x,))
    in_blocks = 2 * 4 * 2 * 16 * 16 * 16 + 4 * 8 * 8 * 9  # 8 channels are filled up to 16
    assert price_work(work_of(call), read_card("l4")).workspace == in_blocks


def test_a_plan_gets_the_rates_of_copies() -> None:
    costs = costs_of(read_card("h200"))
    assert (costs.h2d, costs.host_workers, costs.shared) == (55.05e9, 15, 0.917)
