"""A member's state for newcomers: a copy of it, then every commit, until the newcomer is a member.

May import: elastic, elastic.commits, elastic.deciding, elastic.wire.
"""
