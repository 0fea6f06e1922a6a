"""Where the commits of a run come from.

SwarmCommits    a member computes its lanes, and reduces with others; a newcomer is sent commits
LoggedCommits   a replay computes all lanes as the log says
OneLaneCommits  a single lane is planned
"""

from trainers.elastic.work.commit import Commit
from trainers.elastic.work.plain_work import PlainWork


class Commits:
    """Base of the three."""

    def next(self, work: PlainWork) -> Commit:
        """Return the next commit. The caller applies it before it asks again."""
        raise NotImplementedError

    def applied(self, commit: Commit) -> None:
        """Note that the commit is in the weights."""
        raise NotImplementedError

    def end_run(self) -> None:
        """Note that the whole run has come to its end."""

    def close(self) -> None:
        """End everything. It is safe to call again."""
