"""A member's steps: headers, lanes, the reduce and the vote; and a newcomer's, until it is one.

May import: elastic, elastic.commits, elastic.deciding, elastic.giving, elastic.membership,
    elastic.reducing, elastic.replaying, elastic.wire, elastic.working.
"""
