"""The version of this package, as it was installed."""

from importlib import metadata


def own_version() -> str:
    try:
        return metadata.version("perfect-training")
    except metadata.PackageNotFoundError:
        return "not installed"  # a copy of the code is imported from where it lies
