"""The files and counters that a run keeps: its folder, checkpoints, records, progress.

May import: callbacks, errors, trainers.atomic_checkpoint, trainers.lightning_seams,
    trainers.offloading, trainers.offloading.hardware.
"""
