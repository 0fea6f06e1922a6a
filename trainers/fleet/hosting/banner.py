"""Lightning's banner, which each Trainer says: what the machine has, and tips. Once is enough."""

import logging

SAID_BY = "lightning.pytorch.utilities.rank_zero"
BEGINS = ("GPU available: ", "TPU available: ", "💡 Tip: ")


class Banner(logging.Filter):
    """Passes each line of the banner for one job; what else jobs and others say passes always."""

    def __init__(self, says: bool) -> None:
        """`says`: whether this process has the device that says it for all."""
        super().__init__()
        self._says = says
        self._said: set[str] = set()
        logging.getLogger(SAID_BY).addFilter(self)

    def close(self) -> None:
        logging.getLogger(SAID_BY).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if not str(record.threadName).startswith("perfect-job-") or not line.startswith(BEGINS):
            return True
        first = self._says and line not in self._said
        self._said.add(line)
        return first
