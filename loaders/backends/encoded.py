"""Pictures as they are stored in a folder or in a tar: their encoded bytes and their names."""

from pathlib import Path

from loaders.errors import DecodeError
from loaders.sources.archives import PictureTar
from loaders.sources.datasets import PictureFiles

Encoded = PictureFiles | PictureTar


def read(source: Encoded, index: int) -> bytes:
    """The encoded picture of a sample."""
    try:
        if isinstance(source, PictureTar):
            return source.read(index)
        return source.paths[index].read_bytes()
    except OSError as error:
        raise unreadable(source, index, str(error)) from error


def unreadable(source: Encoded, index: int, reason: str) -> DecodeError:
    """The error for an unreadable picture, with the same text as that of `PictureDecoder`."""
    return DecodeError(
        f"cannot decode picture {_name(source, index)}: {reason}; repair the file or remove it"
    )


def containers(source: Encoded) -> list[Path]:
    """For each sample, the file on disk that it is in."""
    if isinstance(source, PictureTar):
        return [source.path] * len(source)
    return list(source.paths)


def _name(source: Encoded, index: int) -> str:
    if isinstance(source, PictureTar):
        return f"{source.path}:{source.members[index].name}"
    return str(source.paths[index])
