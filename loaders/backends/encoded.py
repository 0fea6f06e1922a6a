"""Pictures as they are stored in a folder or in a tar."""

from loaders.errors import DecodeError
from loaders.sources.archives import PictureTar
from loaders.sources.datasets import PictureFiles

Encoded = PictureFiles | PictureTar


def read(source: Encoded, index: int) -> bytes:
    """The encoded picture of a sample."""
    try:
        return source.read(index)
    except OSError as error:
        raise unreadable(source, index, str(error)) from error


def unreadable(source: Encoded, index: int, reason: str) -> DecodeError:
    """The error for an unreadable picture, with the same text as that of `PictureDecoder`."""
    return DecodeError(
        f"cannot decode picture {source.name_of(index)}: {reason}; repair the file or remove it"
    )
