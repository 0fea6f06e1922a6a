"""The public names of trainers, each imported from where it is."""

from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.offloading.save_step import SaveStep
from trainers.offloading.strategy import OffloadStrategy

__all__ = ["ElasticStrategy", "OffloadStrategy", "SaveStep"]
