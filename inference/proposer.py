"""Who fills the candidate trees: Medusa heads, a smaller model, text that was seen before.

B rows, N nodes, D hidden.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.backbone import Backbone

from .cache import TreeCache
from .draws import Draws
from .layout import TreeLayout
from .propose import Candidates
from .request import Row
from .walk import Path


@dataclass
class DecodingState:
    """What one step hands to the next: the rows that go on."""

    rows: list[Row]
    cache: TreeCache
    hidden: Tensor
    """Hidden state that each root was chosen from, [B, D]."""
    root: Tensor
    """Id of the token that was chosen next, [B]; emitted already, not yet in the cache."""
    generator: torch.Generator | None
    draws: Draws
    drafting: "Drafting"


class Drafting(Protocol):
    """A proposer at work on one request; what it remembers of the request is here."""

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill a tree behind every row's root. It may depend on the text so far and on dice, on nothing else."""

    def commit(self, paths: list[Path]) -> None:
        """Hear which nodes of the last tree were accepted; the rows hold their tokens, and the next root, already."""

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone."""


class Proposer(Protocol):
    """Holds nothing of a request, so that threads can share it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have, root included, ascending; each is compiled once where passes are."""

    @property
    def depth(self) -> int:
        """The most tokens that a step can accept."""

    def for_target(self, target: Backbone, known_tokens: int) -> "Proposer":
        """The same proposer for this target; ids from `known_tokens` on are never proposed.

        Raises:
            ValueError: it cannot propose for this target.
        """

    def start(self, rows: list[Row]) -> Drafting:
        """Begin a request: the rows hold their prompts."""
