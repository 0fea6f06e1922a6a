"""The page of a run, and the parts of a comparison: one HTML file without scripts or downloads.

Nothing here imports torch or Lightning, so a report can be made on a machine without them.

May import: config, errors, trainers.record_file, trainers.plain_values.
"""
