"""What half an hour of a GPU is spent on, in this order. Pure: names, commands and minutes.

arrive      3 min    archive a, wheels; h's net compiles; the tests that were never run on a GPU
accuracy_1  10 min   archive b; S1's four rows, beside them all GPU tests and part b
accuracy_2  9 min    the rest of S1, then S3
speed       9.5 min  part d, alone on the GPU
peers       9.5 min  part e, alone on the GPU
rest        9.5 min  c for the small model, the fleet, sharing
"""

from collections.abc import Mapping
from dataclasses import dataclass

S1 = (
    "no reuse 60, wsd, late decay", "best: wsd 17x3+9 roll12 re", "; wsd 17x3+9 roll3 re",
    "no reuse, 26 fresh in 60 epochs' updates, wsd",
)  # fmt: skip
"""Of part h; its cells have the seeds outermost."""
S3 = ("no reuse, wsd, late decay", "wsd55 roll3 re", "wsd55 roll12 re")
SPEED = (
    "llama-7b lora 8x1K; 8GiB", "llama-7b lora 8x1K; 6GiB", "llama-13b prefill 8K; 12GiB",
    "llama-13b prefill 8K; 6GiB", "gpt2-1.5b full 8x1K; none", "gpt2-1.5b full 8x1K; 12GiB",
)  # fmt: skip
PEERS = (
    "7B LoRA 8x1K; none", "7B LoRA 8x1K; 8 GiB; ours", "7B LoRA 8x1K; 8 GiB; FSDP2",
    "7B LoRA 8x1K; 8 GiB; ZeRO-3", "7B LoRA 8x1K; 8 GiB; RoundPipe, exact",
    "full 6B 1x1K; 16 GiB; ours", "LoRA 13B 1x1K; 16 GiB; ours",
)  # fmt: skip
NEVER_RUN = ("test_captured_streams.py", "test_offload_pinned.py")


@dataclass(frozen=True, slots=True)
class Piece:
    """One command. Words in braces are filled in: {python} {state} {carried} {data}."""

    name: str
    command: tuple[str, ...]
    minutes: float
    beside: bool = False
    """It runs beside the pieces after it, until the phase ends."""
    smoke: bool = True
    """Whether a smoke run has it: not where it needs what is carried."""


def phases(smoke: bool) -> Mapping[str, tuple[Piece, ...]]:
    """A smoke run has the same pieces on the CPU, with tiny models and without words to choose
    cells by, because its cells have other names."""

    def suite(part: str, minutes: float, only: tuple[str, ...] = (), **more: bool) -> Piece:
        name = f"part {part}{' S3' if only == S3 else ''}"
        words = ("--smoke",) if smoke else ("--only", *only) if only else ()
        command = (
            "bash", "benchmarks/gpu/run.sh", part, "--out", "{state}", "--data", "{data}",
            "--minutes", f"{minutes:g}", *words,
        )  # fmt: skip
        return Piece(name, command, minutes + 0.5, **more)

    def tests(name: str, minutes: float, *paths: str) -> Piece:
        some = tuple(f"tests/integration/{file}" for file in NEVER_RUN)
        return Piece(
            name,
            ("{python}", "-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--junitxml",
             f"{{state}}/pytest {name}.xml", *(some if smoke else paths or some)),
            minutes,
        )  # fmt: skip

    def archive(half: str) -> Piece:
        path = f"{{carried}}/cifar10_{half}.zip"
        return Piece(
            f"archive {half}", ("{python}", "-m", "gpu.carried", "unpack", "{data}", path), 1,
            smoke=False,
        )  # fmt: skip

    wheels = Piece("wheels", ("bash", "{carried}/few/install.sh"), 1, smoke=False)
    peers = Piece("peers' wheels", ("bash", "{carried}/peers/install.sh"), 1, smoke=False)
    pipe = Piece("RoundPipe's wheels", ("bash", "{carried}/roundpipe/install.sh"), 1, smoke=False)
    compiles = Piece(
        "compiles",
        ("{python}", "-m", "gpu.compiles", "{state}", *(("--smoke",) if smoke else ())), 2,
    )  # fmt: skip
    return {
        "arrive": (archive("a"), wheels, compiles, tests("never run", 2)),
        "accuracy_1": (
            archive("b"), suite("h", 9, S1, beside=True), tests("all", 5, "tests"), suite("b", 4),
        ),
        "accuracy_2": (suite("h", 4.5, S1), suite("h", 4, S3)),
        "speed": (suite("a", 1), suite("d", 8, SPEED)),
        "peers": (peers, pipe, suite("e", 8, PEERS)),
        "rest": (suite("c", 3, ("gpt2-small",)), suite("i", 3), suite("j", 3)),
    }  # fmt: skip
