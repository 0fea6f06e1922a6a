"""How old the samples of a buffer are: the batches since the first serve of each."""

from dataclasses import dataclass

from loaders.order.serve import IntArray, Residents


@dataclass(slots=True)
class BufferAges:
    """The births of who is in the buffer. It remembers nobody else."""

    reuse: int
    born: dict[int, int]
    """The batch that served each sample of the buffer first."""

    @classmethod
    def of(cls, residents: Residents, reuse: int) -> "BufferAges":
        """The ages where a pass is entered."""
        there = residents.served > 0
        positions, first = residents.positions[there].tolist(), residents.first[there].tolist()
        return cls(reuse, dict(zip(positions, first, strict=True)))

    def count(self, batch: int, positions: IntArray, serves: IntArray) -> int:
        """Note a batch; returns the sum of the ages of its samples."""
        self.born.update(dict.fromkeys(positions[serves == 0].tolist(), batch))
        everybody = positions.tolist()
        ages = batch * len(everybody) - sum(map(self.born.__getitem__, everybody))
        for position in positions[serves == self.reuse - 1].tolist():
            del self.born[position]
        return ages
