"""Parts and views through all that a loader does: workers, resuming, sharing, lanes, caches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import serve_functions as functions
from torch.utils.data import DataLoader

from loaders import Cache, Device, LaneLoader, ReuseLoader, SharedStream, Workers
from loaders.augment import Chain, Flip, Normalize, PadCrop, RandomResizedCrop

MOVE = Chain([PadCrop(3), Flip()])
CROPS = [Chain([RandomResizedCrop(8), Flip()])] * 2 + [RandomResizedCrop(4)] * 3
NAMED = {"mask": "mask", "boxes": "boxes_xyxy", "points": "points"}


class Plain:
    """The parts as plain tensors in a dict. It is a function of the index."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 256, (3, 9, 11), generator=drawn, dtype=torch.uint8)
        left, top = index % 4, index % 5
        return {
            "picture": picture,
            "mask": picture[0].long(),
            "boxes": torch.tensor([[left, top, left + 3.0, top + 2.0]]),
            "points": torch.tensor([[left, top, 2]]),
            "id": index,
        }


def loader(data: Any = None, **changes: Any) -> ReuseLoader:
    usual: dict[str, Any] = {
        "batch_size": 4, "reuse": 3, "buffer_batches": 2, "augment": [MOVE, MOVE],
        "workers": Workers(1, "thread"), "parts": NAMED,
    }  # fmt: skip
    return ReuseLoader(Plain() if data is None else data, **{**usual, **changes})


def told(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape), batch.tolist()
    if isinstance(batch, dict):
        return {key: told(value) for key, value in batch.items()}
    return [told(part) for part in batch] if isinstance(batch, tuple | list) else batch


def served(made: ReuseLoader, passes: int = 1) -> list[Any]:
    with made:
        return [told(batch) for _ in range(passes) for batch in made]


def views_agree(batch: dict[str, Any]) -> bool:
    both = zip(batch["picture"], batch["mask"], strict=True)
    return all(torch.equal(picture[:, 0].long(), mask) for picture, mask in both)


@pytest.mark.parametrize("changes", [{}, {"collate": torch.utils.data.default_collate}])
def test_any_number_of_workers_serves_the_same(changes: dict[str, Any]) -> None:
    one = served(loader(**changes), 2)
    assert one == served(loader(workers=4, **changes), 2)
    assert one != served(loader(seed=1, **changes), 2)


@pytest.mark.parametrize("taken", [1, 5, 16])
@pytest.mark.parametrize("reaugment", [True, False])
def test_a_run_that_goes_on_after_any_batch_sees_the_same(taken: int, reaugment: bool) -> None:
    whole = served(loader(reaugment=reaugment))
    with loader(reaugment=reaugment, workers=2) as first:
        batches = iter(first)
        for _ in range(taken):
            next(batches)
        state = first.state_dict()
    with loader(reaugment=reaugment) as second:
        second.load_state_dict(state)
        assert [told(batch) for batch in second] == whole[taken:]


def test_a_view_more_needs_no_decode_and_changes_no_other() -> None:
    stats, runs = [], list[list[Any]]()
    for views in (1, 2, 3):
        with loader(augment=MOVE if views == 1 else [MOVE] * views) as made:
            runs.append(list(made))
            stats.append((made.stats.decoded, made.stats.served, made.stats.reused))
    assert len(set(stats)) == 1
    for batch, more in zip(runs[1], runs[2], strict=True):
        assert views_agree(batch) and views_agree(more)
        for name in ("picture", *NAMED):
            assert told(batch[name]) == told(more[name][:2])


def drawn(images: torch.Tensor, draws: Any) -> torch.Tensor:
    return torch.from_numpy(draws.uniform())[:, None, None].expand(-1, 1, 1).clone()


def pictures() -> list[Any]:
    return [(sample["picture"], sample["id"]) for sample in map(Plain().__getitem__, range(22))]


def test_reuse_and_views_multiply_into_different_draws() -> None:
    seen: dict[int, set[float]] = {}
    for views, ids in loader(pictures(), augment=[drawn, drawn], parts=None):
        for view in views:
            for number, value in zip(ids.tolist(), view.flatten().tolist(), strict=True):
                seen.setdefault(number, set()).add(value)
    assert len(seen) == 22 and all(len(each) == 3 * 2 for each in seen.values())


def test_crops_of_several_sizes_have_their_own_parts() -> None:
    for batch in loader(augment=CROPS):
        assert [view.shape[-1] for view in batch["picture"]] == [8, 8, 4, 4, 4]
        assert [mask.shape[-1] for mask in batch["mask"]] == [8, 8, 4, 4, 4]
        for boxes, side in zip(batch["boxes"], (8, 8, 4, 4, 4), strict=True):
            assert boxes.min() >= 0 and boxes.max() <= side


def test_colours_come_with_the_moves_and_leave_the_parts() -> None:
    norm = Chain([*MOVE.steps, Normalize((0.0,), (1 / 255,))])
    for batch in loader(augment=[norm, norm]):
        for picture, mask in zip(batch["picture"], batch["mask"], strict=True):
            assert picture.dtype == torch.float32
            assert torch.equal(picture[:, 0].round().long(), mask)


def test_a_dataloader_is_taken_over_with_its_parts() -> None:
    plain = DataLoader(functions.Detections(), batch_size=5, num_workers=0)
    made = ReuseLoader.from_dataloader(plain, reuse=2, augment=MOVE, seed=0)
    with made:
        for pictures, target in made:
            assert torch.equal(pictures[:, 0], target["mask"])
    named = DataLoader(Plain(), batch_size=4, shuffle=True, collate_fn=lambda samples: samples)  # type: ignore[arg-type]
    with ReuseLoader.from_dataloader(named, augment=[MOVE, MOVE], parts=NAMED) as made:
        for sample in (sample for batch in made for sample in batch):
            for picture, mask in zip(sample["picture"], sample["mask"], strict=True):
                assert torch.equal(picture[0].long(), mask)


def test_processes_that_read_serve_what_threads_serve() -> None:
    assert served(loader()) == served(loader(workers=Workers(2, "process")))


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_keeps_parts_and_not_their_draws(cache: Any, tmp_path: Path) -> None:
    folder = tmp_path if cache == "disk" else None
    kept = loader(cache=Cache(cache, 1 << 22, folder))
    assert served(kept, 2) == served(loader(), 2)


def test_a_shared_stream_serves_and_cuts_views() -> None:
    whole = served(loader(batch_size=4, drop_last=True))
    with SharedStream(loader(batch_size=4, drop_last=True)) as stream:
        views = [stream.view(), stream.view(batch_size=2)]
        one, half = iter(views[0]), iter(views[1])
        for expected in whole:
            assert told(next(one)) == expected
            pieces = [next(half) for _ in range(2)]
            for name in ("picture", *NAMED):
                for view in range(2):
                    both = torch.cat([piece[name][view] for piece in pieces])
                    assert told(both) == expected[name][view]


def test_lanes_serve_views() -> None:
    lanes = LaneLoader(loader(batch_size=2), lanes=3)
    with lanes:
        lanes.hold([0, 2])
        for lane in (0, 1, 2):
            assert views_agree(lanes.take(lane).batch)


def test_views_are_made_on_a_device() -> None:
    # A CPU stands for it: the code is the same, but for the streams.
    there = loader(pictures(), parts=None, device=Device("cpu", augments=True))
    assert served(there) == served(loader(pictures(), parts=None))


def test_a_limit_of_memory_counts_every_view() -> None:
    def needed(views: int) -> int:
        with pytest.raises(Exception, match="buffer_bytes") as told_off:
            list(loader(augment=[MOVE] * views, buffer_bytes=1))
        return int(str(told_off.value).rsplit(" ", 6)[-4].rstrip(","))

    picture = 3 * 9 * 11
    one, two = needed(1), needed(2)
    # Four batches of 4: of each sample a further picture, mask, box and point.
    assert two - one == 16 * (picture + 9 * 11 * 8 + 4 * 4 + 3 * 8)
