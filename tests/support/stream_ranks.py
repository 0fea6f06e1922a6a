"""What test_stream_ranks.py runs: two gloo processes that read streams together.

python stream_ranks.py FOLDER      (FOLDER has shard-*.tar; writes rank0.json, rank1.json)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gloo_ranks import main
from support.stream_shards import Counted, decoded

from loaders import LoaderError, ReuseLoader
from loaders.streams import IterableSamples, TarShards


def cases(rank: int, folder: Path) -> dict[str, Callable[[], ReuseLoader]]:
    """What makes the loader of each case."""
    paths = str(folder / "shard-*.tar")

    def tars(found: str = paths, promised: int | None = 20, **options: Any) -> ReuseLoader:
        stream = TarShards(found, decoded, samples=promised)
        return ReuseLoader(stream, 4, 2, 2, workers=1, **options)

    one = str(folder / "shard-000.tar")
    return {
        "tars": tars,
        "an iterable": lambda: ReuseLoader(
            IterableSamples(Counted(20), sharded=False, samples=20), 4, 2, workers=1
        ),
        "unknown length": lambda: tars(promised=None),
        "other seeds": lambda: tars(seed=rank),
        "other lengths": lambda: tars(promised=20 + 2 * rank),
        "other tars": lambda: tars([paths, f"{folder}/shard-00[01].tar"][rank]),
        "one tar": lambda: tars(one),
        "one rank twice": lambda: tars(rank=(1, 2)),
    }


def outcome(make: Callable[[], ReuseLoader]) -> list[list[int]] | str:
    """The samples of each batch of a pass, or why it was refused."""
    try:
        with make() as loader:
            return [labels.tolist() for _, labels in loader]
    except LoaderError as error:
        return str(error)


def told(rank: int, folder: Path) -> dict[str, Any]:
    return {name: outcome(make) for name, make in cases(rank, folder).items()}


if __name__ == "__main__":
    main(told)
