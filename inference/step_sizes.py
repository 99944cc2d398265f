"""How many nodes a step checks: one of a few sizes, since each is compiled once. N nodes, S sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from .token_tree import TokenTree


@dataclass(frozen=True)
class StepSizes:
    """What a step may check, and what that takes."""

    sizes: tuple[int, ...]
    """Root included, ascending, the first is 1."""
    seconds: tuple[float, ...] | None = None
    """What a step of each size takes. None: a step checks all that was found."""
    tokens_per_second: float | None = None
    """With `seconds`: about what decoding reaches. A node is worth its time if it earns tokens at this rate."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"sizes of steps are {self.sizes}; give 1, for steps without a guess, and then larger ones"
            )
        if (self.seconds is None) != (self.tokens_per_second is None):
            raise ValueError(
                f"seconds is {self.seconds} and tokens_per_second {self.tokens_per_second}; give both, or neither to "
                "check all that is found"
            )
        if self.seconds is not None and (len(self.seconds) != len(self.sizes) or min(self.seconds) <= 0):
            raise ValueError(f"seconds {self.seconds} must be positive, one for each of the {len(self.sizes)} sizes")
        if self.tokens_per_second is not None and self.tokens_per_second <= 0:
            raise ValueError(f"tokens_per_second is {self.tokens_per_second}; it must be positive")

    @classmethod
    def up_to(cls, num_nodes: int) -> "StepSizes":
        """1, 4, 8, 16 and so on up to `num_nodes`.

        Raises:
            ValueError: there is not even a root.
        """
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}; a step has at least the root, so give 1 or more, such as 16")
        doubling = [2**power for power in range(2, num_nodes.bit_length()) if 2**power < num_nodes]
        return cls(tuple(sorted({1, *doubling, num_nodes})))

    @property
    def largest(self) -> int:
        """The most nodes of a step, root included."""
        return self.sizes[-1]

    def choose(self, trees: Sequence[TokenTree]) -> int:
        """One size for the trees of all rows: what holds the largest, or what gains most for its time.

        Gain is expected tokens minus the tokens that decoding would emit in that time, as for a `DynamicTree`.
        """
        found = 1 + max(len(tree.tokens) for tree in trees)
        enough = next(size for size in self.sizes if size >= found)
        if self.seconds is None or self.tokens_per_second is None:
            return enough
        gains = {
            size: sum(sum(tree.chances[: size - 1]) for tree in trees) / len(trees) - time * self.tokens_per_second
            for size, time in zip(self.sizes, self.seconds, strict=True)
            if size <= enough
        }
        return max(gains, key=gains.__getitem__)
