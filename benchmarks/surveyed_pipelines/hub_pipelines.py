"""Data sets of Hugging Face, with rows as dicts; their tokenizers and collators."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from loaders import Workers
from surveyed_pipelines.made_up_data import nothing, picture
from surveyed_pipelines.picture_pipelines import imagenet_v1
from surveyed_pipelines.pipeline_case import (
    BATCH,
    COUNT,
    Form,
    Pipeline,
    adopted,
    library,
    whole_sample,
)

# ---- data sets of Hugging Face -------------------------------------------------------------------


class GivenOne:
    """The transform of a row."""

    def __init__(self, random: bool) -> None:
        self.transform = imagenet_v1(random)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": self.transform(row["image"].convert("RGB")), "label": row["label"]}


def hf_rows() -> Any:
    datasets = library("datasets")
    rows = {"image": [picture(number) for number in range(COUNT)], "label": [*range(COUNT)]}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    return datasets.Dataset.from_dict(rows, features=features)


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def hf_map_style(transform: Callable[[Any], Any] | None) -> DataLoader[Any]:
    rows = hf_rows() if transform is None else hf_rows().with_transform(Rows(transform))
    return DataLoader(rows, BATCH, shuffle=True, num_workers=2, collate_fn=stacked)


def hf_streamed(_folder: Path, random: bool) -> DataLoader[Any]:
    stream = hf_rows().to_iterable_dataset(num_shards=2).shuffle(seed=42, buffer_size=8)
    mapped = stream.map(GivenOne(random), remove_columns=["image"])
    return DataLoader(mapped, BATCH, num_workers=2, collate_fn=stacked)


def hf_streamed_decoded(_folder: Path, random: bool, reuse: int) -> Any:
    from loaders import ReuseLoader

    whole = library("loaders.augment").WholeSample
    stream = hf_rows().to_iterable_dataset(num_shards=2).shuffle(seed=42, buffer_size=8)
    return ReuseLoader(
        stream, BATCH, reuse, augment=whole(GivenOne(random)), collate=stacked, workers=1
    )


def labels(batch: Any) -> list[int]:
    return batch["labels"].tolist()


def values(batch: Any) -> Any:
    return batch["pixel_values"]


# ---- tokens of a tokenizer -----------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{n}": n + 2 for n in range(COUNT)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def tokenised_rows() -> Any:
    words = tokenizer()
    texts = [" ".join(f"w{(n + k) % COUNT}" for k in range(2 + n % 7)) for n in range(COUNT)]
    rows = library("datasets").Dataset.from_dict({"text": texts, "label": [*range(COUNT)]})
    return rows.map(lambda row: words(row["text"]), remove_columns=["text"])


def collated(rows: Any) -> DataLoader[Any]:
    collate = library("transformers").DataCollatorWithPadding(tokenizer())
    return DataLoader(rows, BATCH, shuffle=True, num_workers=1, collate_fn=collate)


def tokenised(_folder: Path, _random: bool) -> DataLoader[Any]:
    return collated(tokenised_rows())


def as_tensors(_folder: Path, _random: bool, reuse: int) -> Any:
    return adopted(collated(tokenised_rows().with_format("torch")), reuse)


# ---- pictures with captions ----------------------------------------------------------------------


class Captioned:
    """Tokenises captions where a batch is made, as CLIP's trainers do."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        words = self.tokenizer(
            [sample["caption"] for sample in samples], padding=True, return_tensors="pt"
        )
        pictures = torch.stack([sample["pixel_values"] for sample in samples])
        return {"pixel_values": pictures, "labels": words["input_ids"][:, 0] - 2, **words}


class GivenCaptioned(GivenOne):
    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return super().__call__(row) | {"caption": row["caption"]}


def captioned(_folder: Path, transform: Callable[[Any], Any] | None) -> DataLoader[Any]:
    captions = [" ".join([f"w{n}"] * (1 + n % 4)) for n in range(COUNT)]
    rows = hf_rows().add_column("caption", captions)
    if transform is not None:
        rows = rows.with_transform(Rows(transform))
    return DataLoader(rows, BATCH, shuffle=True, num_workers=2, collate_fn=Captioned())


class Rows:
    """Calls a transform of single rows with a batch of them."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        each = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        made = [self.transform(row) for row in each]
        return {key: [row[key] for row in made] for key in made[0]}


CASES = (
    Pipeline(
        "datasets, with_transform", "Hugging Face's image classification", nothing,
        lambda _folder, random: hf_map_style(GivenOne(random)),
        (*whole_sample(lambda _folder: hf_map_style(None), GivenOne),
         *whole_sample(lambda _folder: hf_map_style(None), GivenOne,
                       workers=Workers(kind="thread"))),
        packages=("datasets",), ids=labels, content=values,
    ),
    Pipeline(
        "datasets, streaming", "Hugging Face's docs", nothing, hf_streamed,
        (Form("`augment=WholeSample(f)` in place of `map(f)`", hf_streamed_decoded),),
        packages=("datasets",), ids=labels, content=values,
    ),
    Pipeline(
        "tokenised text, DataCollatorWithPadding", "Hugging Face's course", nothing, tokenised,
        (Form('`with_format("torch")`', as_tensors),),
        packages=("datasets", "transformers"), ids=labels, content=None, random=False,
        varying=True,
    ),
    Pipeline(
        "pictures and captions, tokenised in the collate", "CLIP fine-tuning", nothing,
        lambda folder, random: captioned(folder, GivenCaptioned(random)),
        (*whole_sample(lambda folder: captioned(folder, None), GivenCaptioned),
         *whole_sample(lambda folder: captioned(folder, None), GivenCaptioned,
                       workers=Workers(kind="thread"))),
        packages=("datasets", "transformers"), ids=labels, content=values, varying=True,
    ),
)  # fmt: skip
