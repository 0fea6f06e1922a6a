"""The public names of loaders, each imported from where it is."""

from loaders.cache.disk_cache import Cache
from loaders.errors import LoaderError
from loaders.lanes.lane_loader import LaneLoader
from loaders.loader import ReuseLoader
from loaders.options import Device, Workers
from loaders.sharing.shared_stream import SharedStream

__all__ = ["Cache", "Device", "LaneLoader", "LoaderError", "ReuseLoader", "SharedStream", "Workers"]
