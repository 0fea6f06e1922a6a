"""The first samples of a stream, read once more at every look: are they the same each time?

What a stream draws, it draws once for all serves of a sample, and a resumed pass would read others.
"""

from typing import Any

from loaders.streams.stream_source import StreamSource, StreamTurn

FIRST = 6


class FirstSamples:
    """A data set of one sample, which has the first ones of a stream."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[Any]:
        reading = self.source.begin(StreamTurn(0, 0, False, 0, 1))
        samples: list[Any] = []
        try:
            while len(samples) < FIRST:
                samples.append(self.source.decode(next(reading)))
        except StopIteration:
            pass  # a stream may have fewer
        finally:
            reading.close()
        return samples
