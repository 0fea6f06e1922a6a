"""A grid of runs as a fleet: its jobs, its folder, its check, and what came of it.

May import: assembly, command_line, commands, config, errors, offload.sizes, report, runs,
    trainers.fleet, trainers.fleet.deciding, trainers.fleet.hosting, trainers.fleet.jobs,
    trainers.fleet.keeping, trainers.fleet.search, trainers.record_file.
"""
