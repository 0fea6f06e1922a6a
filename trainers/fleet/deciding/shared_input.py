"""Says which jobs read their input together."""

from collections.abc import Mapping


def said_inputs(streams: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for every stream that several jobs read. `streams`: what each job reads."""
    found = dict.fromkeys(filter(None, streams.values()))
    readers = [[job for job, read in streams.items() if read == stream] for stream in found]
    return tuple(
        f"input shared by {', '.join(jobs)}: one decode a sample"
        for jobs in readers
        if len(jobs) > 1
    )
