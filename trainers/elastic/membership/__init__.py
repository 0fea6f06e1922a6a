"""A peer's side of the membership: its link to the anchor, on threads of its own.

May import: elastic, elastic.anchor, elastic.deciding, elastic.wire.
"""
