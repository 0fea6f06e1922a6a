"""Text, sound, video, volumes, tables: what is no picture, and often of no fixed length."""

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from surveyed_pipelines.made_up_data import nothing, pixels, write_sound
from surveyed_pipelines.pipeline_case import (
    BATCH,
    COUNT,
    SIDE,
    Form,
    Pipeline,
    adopted,
    whole_sample,
)

Transform = Callable[[Any], Any]


# ---- text ----------------------------------------------------------------------------------------


class Sentences(Dataset[Any]):
    """Numbers of words; sentences have different lengths."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        length = 3 + 5 * index % 11
        return torch.arange(index, index + length), index


def padded(samples: list[Any]) -> Any:
    texts, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels), lengths


def sentences(_folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(Sentences(), BATCH, shuffle=True, num_workers=1, collate_fn=padded)


class BatchesOfLikeLength(Sampler[list[int]]):
    """Batches of sentences that have about the same length."""

    def __init__(self, dataset: Sentences) -> None:
        self.lengths = [len(dataset[index][0]) for index in range(len(dataset))]

    def __len__(self) -> int:
        return -(-len(self.lengths) // BATCH)

    def __iter__(self) -> Any:
        order = np.argsort(self.lengths, kind="stable").tolist()
        yield from (order[at : at + BATCH] for at in range(0, len(order), BATCH))


def bucketed(_folder: Path, _random: bool) -> DataLoader[Any]:
    dataset = Sentences()
    return DataLoader(
        dataset, batch_sampler=BatchesOfLikeLength(dataset), num_workers=1, collate_fn=padded
    )


class SingleIds(Sampler[int]):
    def __init__(self, batches: BatchesOfLikeLength) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches.lengths)

    def __iter__(self) -> Any:
        for batch in self.batches:
            yield from batch


def single_ids(_folder: Path, _random: bool, reuse: int) -> Any:
    dataset = Sentences()
    sampler = SingleIds(BatchesOfLikeLength(dataset))
    dataloader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=1, collate_fn=padded)
    return adopted(dataloader, reuse)


class Blocks(Dataset[Any]):
    """Blocks of a file of token numbers that is mapped into memory, as nanoGPT has it."""

    def __init__(self, path: Path, length: int = 16) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Any:
        block = self.tokens[index * self.length : (index + 1) * self.length + 1]
        both = torch.from_numpy(block.astype(np.int64))
        return both[:-1], both[1:]


def write_tokens(folder: Path) -> None:
    np.arange(COUNT * 16 + 1, dtype=np.uint16).tofile(folder / "train.bin")


def blocks(folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(Blocks(folder / "train.bin"), BATCH, shuffle=True, num_workers=2)


# ---- sound ---------------------------------------------------------------------------------------


class Commands(Dataset[Any]):
    """A sample as torchaudio's SPEECHCOMMANDS has it."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.wav"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with wave.open(str(self.files[index])) as sound:
            rate, frames = sound.getframerate(), sound.readframes(sound.getnframes())
        waveform = torch.from_numpy(np.frombuffer(frames, "<i2").astype(np.float32))[None] / 2**15
        return waveform, rate, f"word {index}", f"speaker {index % 5}", index


def write_sounds(folder: Path) -> None:
    for number in range(COUNT):
        write_sound(folder / f"{number:03d}.wav", number)


def padded_sounds(samples: list[Any]) -> Any:
    waveforms = [sample[0].t() for sample in samples]
    targets = torch.tensor([int(sample[2].removeprefix("word ")) for sample in samples])
    return pad_sequence(waveforms, batch_first=True).permute(0, 2, 1), targets


def commands(folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(
        Commands(folder), BATCH, shuffle=True, num_workers=1, collate_fn=padded_sounds
    )


# ---- video ---------------------------------------------------------------------------------------


class Clips(Dataset[Any]):
    """Clips as dicts, [C, T, H, W], as PyTorchVideo has them."""

    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        frames = np.stack([pixels(index * 8 + n) for n in range(8)])
        video = torch.from_numpy(frames).permute(3, 0, 1, 2)
        sample = {"video": video, "label": index, "video_name": f"{index}.mp4"}
        return sample if self.transform is None else self.transform(sample)


class CropClip:
    """A stretch of time, and the same crop and flip of all its frames."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        video = sample["video"]
        free = [
            size - wanted + 1 for size, wanted in zip(video.shape[1:], (4, SIDE, SIDE), strict=True)
        ]
        t, y, x = (int(torch.randint(n, ())) if self.random else n // 2 for n in free)
        video = video[:, t : t + 4, y : y + SIDE, x : x + SIDE].float() / 255
        if self.random and torch.rand(()) < 0.5:
            video = video.flip(-1)
        return sample | {"video": video.contiguous()}


def clips(transform: Transform | None) -> DataLoader[Any]:
    return DataLoader(Clips(transform), BATCH, shuffle=True, num_workers=1)


# ---- volumes -------------------------------------------------------------------------------------


class Volumes(Dataset[Any]):
    """Scans with their masks, dicts of [1, D, H, W], as MONAI has them."""

    def __init__(self, folder: Path, transform: Transform | None) -> None:
        self.files = sorted(folder.glob("*.npz"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with np.load(self.files[index]) as scan:
            arrays = {key: torch.from_numpy(scan[key]) for key in ("image", "label")}
        sample: dict[str, Any] = {**arrays, "number": index}
        return sample if self.transform is None else self.transform(sample)


def write_volumes(folder: Path) -> None:
    for number in range(COUNT):
        chance = np.random.default_rng(number)
        image = chance.normal(size=(1, 12, 20, 20)).astype(np.float32)
        np.savez(folder / f"{number:03d}.npz", image=image, label=(image > 0.5).astype(np.uint8))


class CropVolume:
    """Several crops of a scan and its mask, as RandCropByPosNegLabeld gives them."""

    def __init__(self, random: bool, crops: int = 2) -> None:
        self.random = random
        self.crops = crops

    def __call__(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._crop(sample, number) for number in range(self.crops)]

    def _crop(self, sample: dict[str, Any], number: int) -> dict[str, Any]:
        places = [np.random.randint(n) if self.random else number for n in (5, 5, 5)]
        where = (slice(None), *(slice(n, n + 8) for n in places))
        return sample | {key: sample[key][where].contiguous() for key in ("image", "label")}


def of_all_crops(samples: list[list[dict[str, Any]]]) -> Any:
    return default_collate([crop for sample in samples for crop in sample])


def volumes(folder: Path, transform: Transform | None) -> DataLoader[Any]:
    dataset = Volumes(folder, transform)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=1, collate_fn=of_all_crops)


# ---- tables and series ---------------------------------------------------------------------------


class Windows(Dataset[Any]):
    """Windows of a series, as long-range forecasting has them: four arrays."""

    def __init__(self) -> None:
        self.series = np.random.default_rng(0).normal(size=(COUNT + 11, 7)).astype(np.float32)
        self.series[:, 0] = np.arange(len(self.series))
        self.times = np.arange(len(self.series) * 4, dtype=np.float64).reshape(-1, 4)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        seen, asked = slice(index, index + 8), slice(index + 4, index + 12)
        return self.series[seen], self.series[asked], self.times[seen], self.times[asked]


def windows(_folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(Windows(), BATCH, shuffle=True, num_workers=1, drop_last=False)


def rows(_folder: Path, _random: bool) -> DataLoader[Any]:
    columns = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(0)), torch.arange(COUNT)
    return DataLoader(TensorDataset(*columns), BATCH, shuffle=True)


CASES = (
    Pipeline("sentences, pad_sequence in the collate", "PyTorch's text tutorials", nothing,
             sentences, random=False, varying=True),
    Pipeline(
        "sentences in batches of like length", "fairseq, batch_sampler", nothing, bucketed,
        (Form("`sampler=` of single ids", single_ids),), random=False, varying=True,
    ),
    Pipeline("blocks of a mapped file of tokens", "karpathy/nanoGPT", write_tokens, blocks,
             ids=lambda batch: [int(row[0]) // 16 for row in batch[0]], random=False),
    Pipeline("Speech Commands, padded", "torchaudio's tutorial", write_sounds, commands,
             random=False, varying=True),
    Pipeline(
        "clips as dicts", "PyTorchVideo's tutorial", nothing,
        lambda _folder, random: clips(CropClip(random)),
        whole_sample(lambda _folder: clips(None), CropClip),
        ids=lambda batch: batch["label"].tolist(), content=lambda batch: batch["video"],
    ),
    Pipeline(
        "volumes with masks, several crops each", "MONAI's tutorials", write_volumes,
        lambda folder, random: volumes(folder, CropVolume(random)),
        whole_sample(lambda folder: volumes(folder, None), CropVolume),
        ids=lambda batch: batch["number"].tolist()[::2], content=lambda batch: batch["image"][::2],
    ),
    Pipeline("windows of a time series", "zhouhaoyi/Informer2020", nothing, windows,
             ids=lambda batch: [int(window[0, 0]) for window in batch[0]], random=False),
    Pipeline("TensorDataset", "PyTorch's basics tutorial", nothing, rows, random=False),
)  # fmt: skip
