"""Whether this server should be sent requests, and why not.

Serving goes on either way: what a bad draft costs is speed, never a wrong token.
But a balancer or an operator should see it, and the trainer heals it.
"""

from __future__ import annotations

from rollout_server.acceptance_tracker import AcceptanceTracker, Counters

READ_BACK, ACCEPTANCE = "read-back", "acceptance"


class Readiness:
    """Reasons against being ready, at most one from each source. Owned by the event loop."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """Every reason there is; empty while the server is ready."""
        return "; ".join(self._reasons[source] for source in sorted(self._reasons))

    def say(self, source: str, reason: str) -> None:
        """What ``source`` finds now; an empty reason takes back what it found before."""
        if reason:
            self._reasons[source] = reason
        else:
            self._reasons.pop(source, None)


class AcceptanceGuard:
    """Looks for a live draft of which nothing is accepted.

    Judges windows of at least ``min_drafts`` verification steps of one draft version
    and one commit. Fewer say nothing: no drafts yet is no number.

    Args:
        tracker: vLLM's counters by draft version.
        min_drafts: length of a window.
    """

    MIN_ACCEPTED = 0.005
    """Accepted tokens a draft under which acceptance length reads 1.00."""

    def __init__(self, tracker: AcceptanceTracker, min_drafts: int) -> None:
        self._tracker = tracker
        self._min_drafts = min_drafts
        self._window: tuple[int, int] | None = None
        self._start = Counters()
        self._verdict = ""

    def check(self, version: int, commits: int) -> str:
        """The verdict now: empty, or why the draft is not to be trusted.

        Args:
            version: that is live.
            commits: of drafts so far; another commit begins anew.
        """
        counters = self._tracker.counters().get(version, Counters())
        if self._window != (version, commits):
            self._window, self._verdict = (version, commits), ""
            self._begin(counters)
        drafts = counters.drafts - self._start.drafts
        if drafts >= self._min_drafts:
            accepted = counters.accepted_tokens - self._start.accepted_tokens
            self._verdict = (
                f"acceptance length of draft {version} is {1 + accepted / drafts:.2f} "
                f"over {drafts} drafts"
                if accepted < self.MIN_ACCEPTED * drafts
                else ""
            )
            self._begin(counters)
        return self._verdict

    def _begin(self, counters: Counters) -> None:
        self._start = Counters(counters.drafts, counters.draft_tokens, counters.accepted_tokens)
