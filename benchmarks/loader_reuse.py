"""Claim: with reuse=3 the loader serves >= 2.5x the images per CPU second that it serves with
reuse=1.

    python benchmarks/loader_reuse.py FOLDER      FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg

Method: one pass over the same pictures a measurement, all variants interleaved in one run,
`--repeats` rounds after a warm-up round; CPU seconds of this process and its children (user +
system) per served image, because wall time on a shared machine measures the neighbours. Same
decoder and same augmentation in every row of ours, so the ratio is that of reuse alone. Beside it:
torch's DataLoader over Pillow and torchvision's v1 transforms (the baseline that people have), and
the ceiling: the same batches from pictures that are decoded already.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from provenance import provenance
from torch.utils.data import DataLoader

from loaders import ReuseLoader
from loaders.pixels.augmentation import Chain, Flip, PadCrop, RandomResizedCrop
from loaders.sources.datasets import PictureFiles, picture_folder

RESULTS = Path(__file__).parent / "results"
SIZE, CROP, BATCH = 256, 224, 32
CROPS = {"shift+flip": Chain([PadCrop(16), Flip()]), "resized crop+flip": Chain(
    [RandomResizedCrop(CROP, (0.35, 1.0)), Flip()])}  # fmt: skip


class PillowPictures:
    """The loader that most people have: Pillow and torchvision's v1 transforms, float32."""

    def __init__(self, files: PictureFiles) -> None:
        from torchvision import transforms

        self.files = files
        self.transform = transforms.Compose([
            transforms.RandomResizedCrop(CROP),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files.paths[index]) as picture:
            image: Any = self.transform(picture.convert("RGB"))  # a tensor: Compose is untyped
            return image, self.files.labels[index]


class Decoded:
    """The ceiling: nothing left to decode."""

    def __init__(self, files: PictureFiles) -> None:
        self.samples = [files[i] for i in range(len(files))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.samples[index]


def cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def cost(make: Callable[[], Iterable[Any]]) -> tuple[float, float]:
    """CPU and wall microseconds a served image, over one pass."""
    loader = make()
    cpu, wall, served = cpu_seconds(), time.perf_counter(), 0
    for pictures, _labels in loader:
        served += len(pictures)
    return (
        1e6 * (cpu_seconds() - cpu) / served,
        1e6 * (time.perf_counter() - wall) / served,
    )


def variants(files: PictureFiles, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    decoded, pillow = Decoded(files), PillowPictures(files)

    def ours(dataset: Any, reuse: int, crop: str) -> Callable[[], Iterable[Any]]:
        return lambda: ReuseLoader(
            dataset, BATCH, reuse=reuse, augment=CROPS[crop], workers=workers, buffer_batches=3
        )

    rows: dict[str, Callable[[], Iterable[Any]]] = {
        "DataLoader, Pillow, v1, float32": lambda: DataLoader(
            pillow,  # type: ignore[arg-type]
            BATCH, shuffle=True, num_workers=workers,
        )
    }  # fmt: skip
    for crop in CROPS:
        for reuse in (1, 2, 3, 6):
            rows[f"reuse={reuse}, {crop}"] = ours(files, reuse, crop)
        rows[f"ceiling: decoded already, {crop}"] = ours(decoded, 1, crop)
    return rows


def measure(
    rows: dict[str, Callable[[], Iterable[Any]]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    seen: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in rows}
    for round_ in range(repeats + 1):
        for name, make in rows.items():
            cpu, wall = cost(make)
            if round_:  # the first round warms caches up
                seen[name]["cpu"].append(cpu)
                seen[name]["wall"].append(wall)
    return seen


def table(seen: dict[str, dict[str, list[float]]]) -> str:
    """Markdown. Ratios within a round, then their median: rounds differ in load, rows of one do
    not."""
    lines = [
        "| loader | CPU us/image, median [min, max] | images/CPU s | against reuse=1 |",
        "|---|---|---|---|",
    ]
    for name, times in seen.items():
        cpu = times["cpu"]
        middle = statistics.median(cpu)
        crop = name.partition(", ")[2]
        own = seen.get(f"reuse=1, {crop}")
        ratio = ""
        if own is not None:
            pairs = [one / this for one, this in zip(own["cpu"], cpu, strict=True)]
            ratio = f"{statistics.median(pairs):.2f}x [{min(pairs):.2f}, {max(pairs):.2f}]"
        lines.append(
            f"| {name} | {middle:.0f} [{min(cpu):.0f}, {max(cpu):.0f}] | {1e6 / middle:.0f}"
            f" | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = args.folder / "train" if (args.folder / "train").is_dir() else args.folder
    files = picture_folder(root, SIZE)
    load = os.getloadavg()[0]
    seen = measure(variants(files, args.workers), args.repeats)
    text = table(seen)
    stem = args.out / f"{args.date}_loader_reuse"
    args.out.mkdir(parents=True, exist_ok=True)
    machine = provenance() | {"load_before": load}
    setting = {
        "pictures": len(files), "stored_square": SIZE, "crop": CROP, "batch": BATCH,
        "workers": args.workers, "repeats": args.repeats, "mean_file_bytes": round(
            statistics.mean(p.stat().st_size for p in files.paths)),
    }  # fmt: skip
    stem.with_suffix(".json").write_text(
        json.dumps({"setting": setting, "machine": machine, "seconds": seen}, indent=1) + "\n"
    )
    head = f"# {(__doc__ or '').partition(chr(10))[0]}\n\n{args.date}. " + ", ".join(
        f"{k} {v}" for k, v in (setting | machine).items()
    )
    stem.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
