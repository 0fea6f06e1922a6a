"""What a step does and what a plan is, as plain data. Pure: every file.

taskgraph (tasks over buffers) and its builder, memgraph (a plan's nodes and places), costs and
rates (seconds), topology (what devices share) and wiring (from what was measured), remarks (what a
plan's runs said).

May import: errors.
"""
