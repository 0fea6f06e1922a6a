"""How often each outcome of a transform that is cut in two comes, against torchvision's."""

from collections import Counter
from typing import Any

import torch
from support.split_transforms import as_stored, both, decoded, picture, serve

from loaders.adopting.transforms import split_transform


def outcomes(images: Any) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for image in images)


@both
def test_a_shifted_and_flipped_picture_has_all_of_torchvisions_outcomes_equally_often(
    v: Any,
) -> None:
    one = picture(height=6, width=6)
    chain = [v.CenterCrop(6), v.RandomCrop(6, padding=1), v.RandomHorizontalFlip(), v.PILToTensor()]
    split = split_transform(chain)
    count = 3600
    mine = outcomes(serve(split, as_stored(decoded(split, one)).repeat(count, 1, 1, 1)))
    torch.manual_seed(0)
    theirs = outcomes(v.Compose(chain)(one) for _ in range(count))
    assert set(mine) == set(theirs)
    assert len(mine) == 18
    assert min(mine.values()) > 140  # of 200
    assert max(mine.values()) < 260
