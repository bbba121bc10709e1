"""When to draft although drafting does not pay, to see whether it would by now."""

PROBE_INTERVAL = 4
"""Rounds without drafts before the first probe. A fruitless probe doubles it; after one that paid the next round is
a probe as well."""


class Probes:
    """The rounds of one call in which drafts of one kind did not pay.

    Attributes:
        now: this round is a probe.
    """

    def __init__(self) -> None:
        self.now = False
        self._idle, self._interval = 0, PROBE_INTERVAL

    def reset(self) -> None:
        """Drafting pays."""
        self._idle, self._interval = 0, PROBE_INTERVAL

    def count(self) -> bool:
        """Count a round in which drafting does not pay. Was drafting switched off with it?"""
        self._idle += 1
        return self._idle == PROBE_INTERVAL == self._interval

    def start(self, affordable: bool) -> bool:
        """Make this round a probe if it is time for one."""
        if self._idle < self._interval or not affordable:
            return False
        self._idle, self._interval, self.now = 0, max(2 * self._interval, PROBE_INTERVAL), True
        return True

    def end(self, paid: bool) -> None:
        """The round is over."""
        if self.now and paid:
            self._interval = 1
        self.now = False
