"""Refuses data sets whose random reading would be frozen by reuse or by the cache.

    reuse 1, no cache      every serve is read anew: nothing is frozen, and nothing is checked
    reaugment=False        every serve of a pass repeats one read: the user asked for just that
    reuse                  all serves of a pass would show one outcome of [i]
    cache                  all serves of the whole run would
    a stream               is told of: to shuffle it may be all that it draws for

It is found out once, when it first matters: where the loader is made, or by `set_reuse`.
"""

import logging
from typing import Any

from loaders.adopting.probing import ProbedReads, variation
from loaders.arguments import Serving
from loaders.errors import CacheError, SourceError, WorkerDied
from loaders.opened_dataset import OpenedDataset
from loaders.slots.leaves import Chunk
from loaders.sources.datasets import unwrapped
from loaders.streams.stream_source import FirstSamples
from loaders.streams.streamed_samples import StreamedSamples
from loaders.worker_kinds import SettledWorkers, reading_thread, worker_process

log = logging.getLogger(__name__)


class ReadCheck:
    """What is known of reading the samples of one data set twice."""

    def __init__(
        self, opened: OpenedDataset, workers: SettledWorkers, cached: bool, tuned: bool, seed: int
    ) -> None:
        """`tuned`: whether the reuse may go up by itself."""
        self._dataset = opened.dataset
        self._left_whole = "" if opened.split is None else opened.split.left_whole
        self._workers = workers
        self._seed = seed
        self._cached = cached
        self._tuned = tuned
        self._stream = None
        if isinstance(opened.dataset, StreamedSamples):
            self._stream = opened.dataset.source
        self._known = opened.decoded is not None or _is_ours(opened.dataset)
        self._variation: str | None = None

    def check(self, *servings: Serving) -> None:
        """Raise an error if one of `servings` would freeze what is random."""
        repeated = any(s.reaugment and (s.reuse > 1 or self._tuned) for s in servings)
        if not repeated and not self._cached:
            return
        if self._stream is not None:
            self._tell_of_stream()
            return
        if not self._known:
            self._variation, self._known = self._probed(), True
        if self._variation is None:
            return
        kind = type(self._dataset).__name__
        why = f" ({self._left_whole})" if self._left_whole else ""
        move = (
            f"reading {kind} is random: {self._variation}{why}; give the data set without what is"
            " random, and give that as augment= (or in a collate function): then it is drawn anew"
            " for every serve"
        )
        if self._cached:
            raise CacheError(
                f"{move}. With a cache, one draw would be served for the whole run: or leave the"
                " cache off, with reuse=1"
            )
        raise SourceError(
            f"{move}. With reuse, one draw would be served several times: or give"
            " reaugment=False, if every serve of a pass may repeat its draw, or reuse=1"
        )

    def _tell_of_stream(self) -> None:
        """Say once if the stream gives other samples each time."""
        source, self._stream = self._stream, None
        if source is None or not source.is_read_twice:
            return
        probed = ProbedReads(FirstSamples(source))
        found = variation(1, lambda ids: _read_here(probed, ids[0]))
        if found is not None:
            log.warning(
                "the stream %s draws by chance (%s): what it draws for a sample is the same in all"
                " its serves, and a pass that is resumed in its middle is refused where it gives"
                " other samples. Give what augments as augment=, leave shuffling to the loader, or"
                " draw as a function of the pass (set_epoch); reaugment=False says that you mean"
                " it",
                source.identity,
                found.replace("sample 0 was", "its first samples were"),
            )

    def _probed(self) -> str | None:
        samples, probed = len(self._dataset), ProbedReads(self._dataset)
        if self._workers.kind == "thread" and self._workers.asked.timeout is None:
            return variation(samples, lambda ids: _read_here(probed, ids[0]))
        if self._workers.kind == "thread":
            with reading_thread(probed, self._workers.asked.timeout or 0, 0) as thread:
                return variation(samples, thread.read)
        with worker_process(probed, self._workers, self._seed, 0) as process:
            process.read([])  # it raises an error where the data set cannot be sent there
            try:
                return variation(samples, process.read)
            except WorkerDied:  # a pass says so too, and may skip that sample
                return None


def _read_here(probed: ProbedReads, sample_id: int) -> Chunk:
    try:
        return Chunk([probed[sample_id]])
    except Exception as error:
        return Chunk([], error)


def _is_ours(dataset: Any) -> bool:
    """Whether our own code reads it, which draws nothing."""
    return type(unwrapped(dataset)[0]).__module__.startswith("loaders.")
