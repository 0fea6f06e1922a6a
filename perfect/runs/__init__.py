"""The files and counters that a run keeps: its folder, checkpoints, records, progress.

May import: callbacks, config, errors, report, trainers.atomic_checkpoint,
    trainers.elastic.deciding, trainers.elastic.peer, trainers.folder_lock,
    trainers.lightning_seams, trainers.offloading, trainers.read_checkpoint, trainers.steps,
    version.
"""
