"""The public names of loaders, each imported from where it is."""

from loaders.errors import LoaderError
from loaders.lanes.lane_loader import LaneLoader
from loaders.loader import ReuseLoader
from loaders.sharing.shared_stream import SharedStream

__all__ = ["LaneLoader", "LoaderError", "ReuseLoader", "SharedStream"]
