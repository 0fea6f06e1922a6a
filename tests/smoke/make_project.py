"""A user's project in a folder: a few pictures and a YAML. Used by .ci/run on the installed wheel.

python make_project.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

RECIPE = """
model: {name: pilot}
data: {name: imagefolder, root: pictures, picture_size: 16, holdout: 4}
loader: {batch_size: 4}
phases:
  - {name: pretrain, passes: 2, reuse: 3, lr: {kind: constant, lr: 1e-2}}
  - {name: finetune, passes: 2, lr: {kind: linear, lr: 1e-2}}
trainer: {accelerator: cpu}
"""


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            target = folder / "pictures" / split / name
            target.mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(target / f"{number}.jpg")
    (folder / "recipe.yaml").write_text(RECIPE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
