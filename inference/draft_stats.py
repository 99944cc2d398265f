"""What drafting for one request took, what came of it, and how many drafts pay by that."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from .formulas import expected_tokens, speedup

RECENT = 32
"""Tests and times that the choice of k looks back over."""
RETRY = 16
"""After so many steps without drafts, some are tried again."""
PLAIN_STEPS = 3
"""A plain pass is measured at least so often; the quickest counts."""
FIRST_TRY = 2
"""Drafts of a step that tries."""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass
class DraftStats:
    """Acceptance and times of one request. Times are of all its rows together."""

    tested: int = 0
    """Levels of drafts that acceptance looked at."""
    accepted: int = 0
    """Levels of which it took a draft."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Verify passes and acceptance."""
    levels: list[int] = field(default_factory=list)
    """How many levels of drafts, k, each step had."""
    recent: deque[float] = field(default_factory=_recent)
    """The last tests: 1 where a draft was accepted."""
    pass_seconds: deque[float] = field(default_factory=_recent)
    """The last times of one pass of the draft."""
    step_seconds: defaultdict[int, deque[float]] = field(default_factory=lambda: defaultdict(_recent))
    """The last times of verifying k levels of drafts, by k."""

    def count_step(self, k: int, accepted: list[int], draft_seconds: float, verify_seconds: float) -> None:
        """Take note of a step of k levels.

        Args:
            k: how many levels there were.
            accepted: how many of them were taken, of each row that goes on.
            draft_seconds: time of k passes of the draft.
            verify_seconds: time of the verify pass and of acceptance.
        """
        for count in accepted if k else []:
            tests = [1.0] * count + [0.0] * (count < k)
            self.recent.extend(tests)
            self.tested += len(tests)
            self.accepted += count
        self.levels.append(k)
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.step_seconds[k].append(verify_seconds)
        if k:
            self.pass_seconds.append(draft_seconds / k)

    @property
    def alpha(self) -> float:
        """Share of tests that a draft passed: for chains an estimate of E[sum min(p, q)]."""
        return self.accepted / self.tested if self.tested else 0.0

    def expected_tokens(self, k: int) -> float:
        """E[N] that the formula predicts for k drafts at this acceptance."""
        return expected_tokens(self.alpha, k)

    def costs(self, k: int, plain_seconds: float) -> tuple[float, float]:
        """(c, v): what a pass of the draft and verifying k drafts take, in plain passes.

        Where k was not tried, v lies on the line through the plain pass and the most drafts that were.
        """
        draft = median(self.pass_seconds) / plain_seconds
        if k in self.step_seconds:
            return draft, median(self.step_seconds[k]) / plain_seconds
        tried = max(self.step_seconds)
        slope = (median(self.step_seconds[tried]) / plain_seconds - 1) / tried
        return draft, 1 + k * max(slope, 0.0)

    def predicted_speedup(self, k: int, plain_seconds: float) -> float:
        """What the formula makes of this acceptance and these times; `plain_seconds` is one plain pass."""
        return speedup(self.alpha, k, *self.costs(k, plain_seconds))

    def best_k(self, most: int) -> int:
        """How many drafts the next step should have, by what is known before it: 0 to `most`."""
        plain_steps = self.step_seconds[0]
        if not plain_steps or (len(plain_steps) < PLAIN_STEPS and len(self.levels) % RETRY == 0):
            return 0  # what a plain pass takes is measured first, and again, since the first one may compile
        if not self.recent or not any(self.levels[-RETRY:]):
            return min(FIRST_TRY, most)
        alpha, plain = sum(self.recent) / len(self.recent), min(plain_steps)
        return max(range(most + 1), key=lambda k: speedup(alpha, k, *self.costs(k, plain)))
