"""The pictures that loaders decode."""

import tarfile
from pathlib import Path

from benchmarks.peers import folders

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos500.tar"


def pictures(folder: Path, smoke: bool) -> tuple[Path, bool]:
    """A folder of photos, or of pictures that are made up and decode faster; and whether they are
    photos."""
    if smoke or not PHOTOS.exists():
        return folders.made_up_photos(folder / "made_up", 24 if smoke else 500), False
    with tarfile.open(PHOTOS) as photos:
        photos.extractall(folder, filter="data")
    classes = [path.parent for path in folder.rglob("*.jpg")]
    return classes[0].parent, True
