"""Refuses data sets whose random reading would be frozen by reuse or by the cache.

    reuse 1, no cache      every serve is read anew: nothing is frozen, and nothing is checked
    reaugment=False        every serve of a pass repeats one read: the user asked for just that
    reuse, cache           serves of a pass, or of the whole run, would show one outcome of [i]
    a stream               a warning only: it may draw nothing but its shuffle

A random transform of the data set's own is taken out of it, where samples prove that this changes
none (`without_transform`). It is found out once, when it first matters.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from loaders.adopting.own_transforms import (
    LIFTED,
    Lift,
    ReadBothWays,
    advice,
    lifted,
    possible_lifts,
)
from loaders.adopting.probing import SECONDS, ProbedReads, bytes_of, schedule, variation
from loaders.adopting.transforms import TransformSplit
from loaders.arguments import Serving
from loaders.batching.user_views import WholeSample
from loaders.errors import CacheError, SourceError, WorkerDied
from loaders.opened_dataset import OpenedDataset
from loaders.options import LoaderOptions, reading_thread, worker_process
from loaders.pipeline import PipelineSetup
from loaders.pixels.augmentation import Chain
from loaders.slots.leaves import Chunk
from loaders.sources.datasets import unwrapped
from loaders.streams.streamed_samples import FirstSamples, StreamedSamples

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ReadCheck:
    """What is known of reading the samples of one data set twice."""

    setup: PipelineSetup

    def __post_init__(self) -> None:
        dataset, self._stream = self.setup.opened.dataset, None
        if isinstance(dataset, StreamedSamples):
            self._stream = dataset.source
        self._known = self.setup.opened.decoded is not None or _is_ours(dataset)
        self._variation: str | None = None
        self._lifted: OpenedDataset | str = ""
        """Without the transform that is random; or why that cannot be taken out."""
        self._sample_bytes: int | None = None

    @property
    def sample_bytes(self) -> int | None:
        """How large a sample is. None: no code of the user's own has read one yet."""
        dataset = self.setup.opened.dataset
        if self._sample_bytes is None and _is_ours(dataset) and self._stream is None:
            with suppress(Exception):  # reading it later raises it
                self._sample_bytes = bytes_of(dataset[0])
        return self._sample_bytes

    def opened_for(self, serving: Serving) -> OpenedDataset:
        """What passes read that are served like this, and were checked."""
        lifted, setup = self._lifted, self.setup
        return setup.opened if isinstance(lifted, str) or not self._freezes(serving) else lifted

    def check(self, *servings: Serving) -> None:
        """Refuse `servings` that would freeze what is random, unless that can be taken out."""
        if not self._freezes(*servings):
            return
        if self._stream is not None:
            self._warn_of_random_stream()
            return
        opened, options = self.setup.opened, self.setup.options
        if not self._known:
            self._variation, self._known = self._varies(opened.dataset), True
            free = opened.split is None and options.augment is None and options.once is None
            if self._variation and free:
                self._lifted = without_transform(opened, options, self._reading, self._varies)
        if self._variation is None or not isinstance(self._lifted, str):
            return
        how = self._lifted or (
            "give the data set without what is random, and give that as augment= (or in a collate"
            " function): then it is drawn anew for every serve"
        )
        kind = type(opened.dataset).__name__
        move = f"reading {kind} is random: {self._variation}; {how}"
        if options.cache is not None:
            raise CacheError(
                f"{move}. With a cache, one draw would be served for the whole run: or leave the"
                " cache off, with reuse=1"
            )
        raise SourceError(
            f"{move}. With reuse, one draw would be served several times: or give"
            " reaugment=False, if every serve of a pass may repeat its draw, or reuse=1"
        )

    def _freezes(self, *servings: Serving) -> bool:
        """Whether one of them would serve several times what was read once."""
        repeated = any(s.reaugment and s.reuse > 1 for s in servings)
        return repeated or self.setup.options.cache is not None

    def _warn_of_random_stream(self) -> None:
        """Say once if the stream gives other samples each time."""
        source, self._stream = self._stream, None
        if source is None or not source.is_read_twice:
            return
        probed = ProbedReads(FirstSamples(source))
        difference = variation(1, lambda ids: _read_here(probed, ids[0]))
        if difference is not None:
            log.warning(
                "the stream %s draws by chance (%s): what it draws for a sample is the same in all"
                " its serves, and a pass that is resumed in its middle is refused where it gives"
                " other samples. Give what augments as augment=, leave shuffling to the loader, or"
                " draw as a function of the pass (set_epoch); reaugment=False: you mean it",
                source.identity,
                difference.replace("sample 0 was", "its first samples were"),
            )

    def _varies(self, dataset: Any) -> str | None:
        """In what reading a data set varies."""
        with self._reading(ProbedReads(dataset)) as read:
            try:
                return variation(len(dataset), self._measured(read))
            except WorkerDied:  # a pass says so too, and may skip that sample
                return None

    def _measured(self, read: Callable[[Sequence[int]], Chunk]) -> Callable[[Sequence[int]], Chunk]:
        def measured(ids: Sequence[int]) -> Chunk:
            chunk = read(ids)
            for _, _, nbytes in cast(Any, chunk.samples):
                self._sample_bytes = max(self._sample_bytes or 0, nbytes)
            return chunk

        return measured

    @contextmanager
    def _reading(self, probed: Any) -> Iterator[Callable[[Sequence[int]], Chunk]]:
        """A function that reads samples of `probed` where those of the data set are read."""
        workers, timeout = self.setup.workers, self.setup.workers.asked.timeout
        if workers.kind == "thread" and timeout is None:
            yield lambda ids: _read_here(probed, ids[0])
        elif workers.kind == "thread":
            with reading_thread(probed, timeout or 0, 0) as thread:
                yield thread.read
        else:
            with worker_process(probed, workers, self.setup.seed, 0) as process:
                process.read([])  # it raises an error where the data set cannot be sent there
                yield process.read


def _read_here(probed: Any, sample_id: int) -> Chunk:
    try:
        return Chunk([probed[sample_id]])
    except Exception as error:
        return Chunk([], error)


def _is_ours(dataset: Any) -> bool:
    """Whether our own code reads it, which draws nothing."""
    return type(unwrapped(dataset)[0]).__module__.startswith("loaders.")


Reading = Callable[[Any], AbstractContextManager[Callable[[Sequence[int]], Chunk]]]
"""Lends a function that reads samples of a data set, wherever samples are read."""


def without_transform(
    opened: OpenedDataset,
    options: LoaderOptions,
    reading: Reading,
    varies: Callable[[Any], str | None],
) -> OpenedDataset | str:
    """The data set whose random transform is redone at every serve; or why it is not."""
    dataset = opened.dataset
    for lift in possible_lifts(dataset):
        proof = _prove(dataset, lift, reading)
        if isinstance(proof, Lift):
            lift, taken = proof, lifted(dataset, proof)
            proof = "what [i] does beside it is random" if varies(taken) else ""
            if not proof and lift.name in LIFTED:
                ours = None if options.collate else lift.batched()
                augment = WholeSample(lift) if ours is None else Chain(ours)
                split = TransformSplit(None, augment, ours is not None, lift.report)
                return replace(opened, dataset=taken, split=split)
        if lift.name in LIFTED or not proof:
            cannot = f" cannot be redone apart from the rest of [i] ({proof})" if proof else " is"
            return f"its .{lift.name}{cannot}: {advice(lift.name)}"
    return ""


def _prove(dataset: Any, lift: Lift, reading: Reading) -> Lift | str:
    """The lift with the paths that samples show, or why it would change one."""
    proven: Lift | None = None
    until = time.monotonic() + SECONDS
    try:
        with reading(ReadBothWays(dataset, lift)) as read:
            for sample_id in dict.fromkeys(schedule(len(dataset))):
                if proven is not None and time.monotonic() > until:
                    break
                chunk = read([sample_id])
                if isinstance(chunk.error, Exception):
                    continue  # a pass reports what it cannot read
                if chunk.error is not None:
                    raise chunk.error
                answer = cast(Any, chunk.samples[0])
                if isinstance(answer, str):
                    return f"sample {sample_id}: {answer}"
                before, proven = proven, replace(lift, paths=answer[0], form=answer[1])
                if before not in (None, proven):
                    return f"sample {sample_id}: it is given something else than for others"
    except WorkerDied as error:
        return str(error)
    return proven or "none of the samples that were tried could be read"
