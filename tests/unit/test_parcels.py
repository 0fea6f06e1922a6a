"""A batch that is packed, written and unpacked is the same, whatever it is made of."""

import gc
import mmap
import os
import sys
import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from loaders.errors import SharingError
from loaders.sharing.lent_blocks import HELD, BorrowedBlocks, LentBlocks, Shipment
from loaders.sharing.parcels import pack, unpack

Pair = namedtuple("Pair", "left right")


class Named(torch.Tensor):
    """A tensor with an attribute."""

    title: str


def sent(batch: Any) -> Any:
    packed = pack(batch)
    area = mmap.mmap(-1, max(1, packed.parcel.nbytes))
    packed.write(area)
    return unpack(packed.parcel, area)


def check_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert type(mine) is type(theirs)
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    bits = [tensor.flatten().contiguous().view(torch.uint8) for tensor in (mine, theirs)]
    assert torch.equal(*bits)


numbers = torch.arange(1, 49, dtype=torch.float32)
TENSORS = {
    "plain": numbers,
    "channels last": numbers.view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last),
    "part": numbers.view(6, 8)[2:4, 1:7:2],
    "reversed dims": numbers.view(2, 4, 6).permute(2, 0, 1),
    "expanded": numbers[:3].view(3, 1).expand(3, 4),
    "no rows": numbers.view(6, 8)[3:3],
    "nothing": torch.empty(0),
    "one number": torch.tensor(7),
    "bfloat16": numbers.bfloat16()[5:],
    "flags": numbers > 20,
    "complex": torch.complex(numbers, -numbers)[3:].view(5, 9),
    "nan": torch.tensor([float("nan"), -0.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_bits_and_strides(name: str) -> None:
    check_same(sent(TENSORS[name]), TENSORS[name])


def test_a_nest_arrives_as_it_was() -> None:
    left, right = numbers.clone(), torch.arange(5)
    batch = {"pair": Pair(left, [right, "word", None]), 3: (1.5, b"x", {left.dtype})}
    got = sent(batch)
    assert list(got) == ["pair", 3]
    assert type(got["pair"]) is Pair
    check_same(got["pair"].left, left)
    check_same(got["pair"].right[0], right)
    assert got["pair"].right[1:] == ["word", None]
    assert got[3] == batch[3]


def test_arrays_arrive_over_the_shared_memory() -> None:
    array, fixed = np.arange(12.0).reshape(3, 4), np.arange(5)
    fixed.flags.writeable = False
    words = np.array(["a", None], dtype=object)
    packed = pack([array, fixed, words, array.T])
    assert packed.parcel.nbytes >= array.nbytes + fixed.nbytes
    assert len(packed.parcel.nest) < 600
    got = sent([array, fixed, words, array.T])
    for mine, theirs in zip(got, [array, fixed, words, array.T], strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    got[0][:] = 0
    assert array[1, 1] == 5
    assert [part.flags.writeable for part in got] == [True, False, True, True]


def test_tensors_that_share_memory_still_do_and_the_rest_of_it_stays_at_home() -> None:
    large = torch.zeros(1 << 16)
    row, column, again = large[100:110], large[105:120], large[100:110]
    assert pack([row, column, again, row]).parcel.nbytes < 200
    mine = sent([row, column, again, row])
    assert mine[0] is mine[3]
    mine[0][5:] = 1
    assert mine[1][:5].tolist() == mine[2][5:].tolist() == [1] * 5
    assert large.sum() == 0


def test_a_tensor_of_a_subclass_keeps_its_class_and_attributes() -> None:
    picture = numbers.clone().as_subclass(Named)
    picture.title = "cat"
    got = sent((picture, picture[:3]))
    assert type(got[0]) is Named
    assert got[0].title == "cat"
    assert got[0].tolist() == numbers.tolist()


def test_tensors_may_be_changed_though_they_arrived_in_inference_mode() -> None:
    with torch.inference_mode():
        got = sent(numbers)
    got += 1
    assert got[0] == 2


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(SharingError, match=r"cannot be sent to another process: .*lock"):
        pack([numbers, threading.Lock()])
    parcel = pack([Pair(1, 2)]).parcel
    kept = globals().pop("Pair")
    try:
        with pytest.raises(SharingError, match=r"cannot be rebuilt in this process: .*Pair"):
            unpack(parcel, bytearray())
    finally:
        globals()["Pair"] = kept


# ---- blocks -------------------------------------------------------------------------------------


class BothEnds:
    """Blocks at both ends, without the link between them."""

    def __init__(self) -> None:
        self.lent, self.borrowed = LentBlocks(), BorrowedBlocks()

    def send(self, batch: Any) -> Shipment:
        shipment, file = self.lent.ship(pack(batch))
        self.borrowed.receive(shipment, file)
        return shipment

    def serve(self, batch: Any) -> Any:
        got = self.borrowed.open(self.send(batch))
        self.lent.take_back(self.borrowed.returned())
        return got


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="blocks are Linux's")


@needs_linux
def test_blocks_are_used_again_when_nobody_holds_what_was_in_them() -> None:
    ends = BothEnds()
    kept: Any = None
    for number in range(9):
        batch = ends.serve([torch.full((64,), number), torch.tensor([number])])
        kept = kept if kept is not None else batch[0][10:20].numpy()
        assert batch[0][0] == number
    assert kept.tolist() == [0] * 10
    size = pack([torch.full((64,), 0), torch.tensor([0])]).parcel.nbytes
    # One is kept, one is the loop's, one was when the next came, and that one came in the fourth.
    assert ends.lent.nbytes == 4 * size


@needs_linux
def test_who_keeps_all_batches_keeps_few_blocks_and_files() -> None:
    gc.collect()
    ends, before = BothEnds(), open_files()
    kept = [ends.serve(torch.full((64,), number)) for number in range(40)]
    assert [batch[3].item() for batch in kept] == list(range(40))
    assert ends.lent.nbytes <= (HELD + 1) * kept[0].nbytes
    assert open_files() - before <= 2 * (HELD + 1)
    del kept, ends
    gc.collect()
    assert open_files() == before
