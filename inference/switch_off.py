"""Where a tree does not pay, decode plainly for a while, then try again."""

import math
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa.backbone import Backbone
from medusa.tree import CandidateTree

from .head_proposer import HeadProposer
from .layout import TreeLayout
from .propose import Candidates
from .proposer import DecodingState
from .request import Row
from .walk import Path

ENOUGH = 8
"""A tree is judged by so many of its last steps."""
PLAIN_STEPS = 64
"""After so many plain steps the tree is tried again."""


@dataclass(frozen=True)
class StepCosts:
    """Time of a step with the tree / time of a plain step, by batch size and length of the text, where measured."""

    ratios: Mapping[tuple[int, int], float]

    def __post_init__(self) -> None:
        if not self.ratios:
            raise ValueError("there are no step costs; give at least one, such as {(1, 128): 1.3}")
        for (batch, context), ratio in self.ratios.items():
            if batch < 1 or context < 1 or not 0 < ratio < math.inf:
                raise ValueError(
                    f"step cost {ratio} at batch {batch} and context {context}; the three must be positive, and a cost "
                    "is a time in plain steps, such as 1.3"
                )

    def at(self, batch: int, context: int) -> float:
        """The cost that was measured nearest, by ratio of batch sizes and of contexts."""

        def distance(point: tuple[int, int]) -> float:
            return abs(math.log(point[0] / batch)) + abs(math.log(point[1] / context))

        return self.ratios[min(self.ratios, key=distance)]


@dataclass
class Switch:
    """Decides for one request, step by step."""

    costs: StepCosts
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    """Tokens that the last steps with the tree emitted, mean over rows."""
    plain_left: int = 0

    def pays(self, batch: int, context: int) -> bool:
        """Whether the next step should have the tree: it emits more than plain steps would in its time."""
        if self.plain_left == 0 and len(self.recent) == ENOUGH:
            gain = sum(self.recent) / ENOUGH / self.costs.at(batch, context)
            if gain < 1:
                self.plain_left = PLAIN_STEPS
                self.recent.clear()
        if self.plain_left == 0:
            return True
        self.plain_left -= 1
        return False

    def count(self, tokens: list[int]) -> None:
        """Take note of what a step with the tree emitted, for each row."""
        self.recent.append(sum(tokens) / len(tokens))


class SwitchOff:
    """Heads as proposer, left out where they do not pay: `MedusaDecoder(model, proposer=SwitchOff(heads, costs))`.

    The text stays what it was: a step without guesses is a step of plain decoding.
    """

    def __init__(self, heads: HeadProposer, costs: StepCosts) -> None:
        """Watch `heads`; `costs` are of its tree on this machine."""
        self.heads = heads
        self.costs = costs
        self.said = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have: those of the tree, or the root alone."""
        return tuple(sorted({1, *self.heads.sizes}))

    @property
    def depth(self) -> int:
        """The most tokens that a step can accept."""
        return self.heads.depth

    def for_target(self, target: Backbone, known_tokens: int) -> "SwitchOff":
        """The heads know their backbone."""
        return self

    def start(self, rows: list[Row]) -> "SwitchedDrafting":
        """Begin with the tree."""
        return SwitchedDrafting(self)

    def say_so(self) -> None:
        """Warn, once."""
        if not self.said:
            self.said = True
            warnings.warn(
                "the heads' guesses do not pay for this text, batch size and length: steps with the tree take longer "
                "than what they emit is worth, so some are decoded plainly; the text stays the same",
                stacklevel=2,
            )


class SwitchedDrafting:
    """One request's switch."""

    def __init__(self, proposer: SwitchOff) -> None:
        self.proposer = proposer
        self.switch = Switch(proposer.costs)
        self.with_tree = True

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill the tree, or give the root alone."""
        self.with_tree = self.switch.pays(len(state.rows), max(row.length for row in state.rows))
        if self.with_tree:
            return self.proposer.heads.propose(state)
        self.proposer.say_so()
        return Candidates(state.root[:, None]), TreeLayout.of(CandidateTree(()), state.root.device)

    def commit(self, paths: list[Path]) -> None:
        """Learn what the tree gave."""
        if self.with_tree:
            self.switch.count([len(path) for path in paths])

    def select(self, rows: list[int]) -> None:
        """The switch is of all rows together."""
