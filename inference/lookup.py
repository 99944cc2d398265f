"""Guess what comes next from what came after the same words before: prompt lookup, n-gram and suffix proposals.

Saxena 2023, *Prompt Lookup Decoding*; Yang et al. 2023, *LLMA*; Oliaro et al. 2024, *SuffixDecoding* (trees of several
continuations, from the text and from earlier outputs). B rows, N nodes.
"""

import copy
from collections.abc import Iterable, Sequence

from medusa.backbone import Backbone

from .layout import TreeLayout
from .ngrams import Followers, NGramIndex
from .propose import Candidates
from .proposer import DecodingState
from .request import Row
from .step_sizes import StepSizes
from .token_tree import Continuations, Tokens, grow, lay_out
from .walk import Path

PRIOR = (0.29, 0.52, 0.61, 0.69, 0.92)
"""How often the next token is among those that followed the same run of 1, 2, ... tokens before, where no longer run is
known; the last is for runs of at least its length. Counted over 150 greedy answers (17,000 tokens) of
SmolLM2-135M-Instruct to chat prompts."""
PRIOR_WEIGHT = 10.0
"""The table counts as much as so many tokens of the request."""


class Lookup:
    """Proposes what followed the longest run of tokens that was seen before: in the row's text, in earlier outputs.

    Holds the corpus and nothing of a request. Proposals depend on the text alone, so acceptance is exact.
    """

    def __init__(
        self,
        num_nodes: int = 16,
        max_ngram: int = 5,
        corpus: Iterable[Sequence[int]] | None = None,
        vocab_size: int | None = None,
        min_chance: float = 0.02,
        sizes: StepSizes | None = None,
    ) -> None:
        """Index the corpus.

        Args:
            num_nodes: the most nodes of a step, root included.
            max_ngram: how long a run is compared at most.
            corpus: token ids of earlier outputs, or of other texts that answers may quote. Its texts count like the
                row's own.
            vocab_size: the target's; needed with a corpus, whose ids are checked against it.
            min_chance: leave out nodes that are reached less often: about what one more node adds to the time of a
                verify pass, in passes.
            sizes: instead of `num_nodes`: which sizes steps may have, and what they take here.

        Raises:
            ValueError: an argument is out of its range, or the corpus is empty or holds ids that no token has.
        """
        if max_ngram < 1:
            raise ValueError(f"max_ngram is {max_ngram}; runs have at least one token, so give 1 or more, such as 5")
        if not 0 < min_chance < 1:
            raise ValueError(f"min_chance is {min_chance}; it must lie between 0 and 1, such as 0.02")
        self.step_sizes = StepSizes.up_to(num_nodes) if sizes is None else sizes
        self.max_ngram = max_ngram
        self.min_chance = min_chance
        self.known_tokens: int | None = None
        """Ids from here on are not proposed; None: all may be."""
        self.corpus = NGramIndex(max_ngram) if corpus is None else _indexed(corpus, vocab_size, max_ngram)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes a step may have."""
        return self.step_sizes.sizes

    @property
    def depth(self) -> int:
        """The most tokens that a step can accept: a chain of all nodes."""
        return self.step_sizes.largest - 1

    def for_target(self, target: Backbone, known_tokens: int) -> "Lookup":
        """The same look-up, which passes over what texts hold and the target never emits."""
        fitted = copy.copy(self)
        fitted.known_tokens = known_tokens
        return fitted

    def start(self, rows: list[Row]) -> "LookupDrafting":
        """Index the prompts."""
        return LookupDrafting(self, [WrittenText(row, self) for row in rows])


class LookupDrafting:
    """A tree for each row, all of one size."""

    def __init__(self, lookup: Lookup, texts: list["WrittenText"]) -> None:
        """Propose from `texts`, one for each row."""
        self.lookup = lookup
        self.texts = texts

    def propose(self, state: DecodingState) -> tuple[Candidates, TreeLayout]:
        """Fill a tree behind every row's root."""
        sizes = self.lookup.step_sizes
        trees = []
        for text in self.texts:
            text.catch_up()
            trees.append(grow(text.continuations, sizes.largest, self.lookup.min_chance))
        return lay_out(trees, state.root, sizes.choose(trees))

    def commit(self, paths: list[Path]) -> None:
        """What was accepted is read from the rows."""

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self.texts = [self.texts[i] for i in rows]


class WrittenText:
    """A row's text, and what it says about how it goes on."""

    def __init__(self, row: Row, lookup: Lookup) -> None:
        """Read the prompt."""
        self.row = row
        self.corpus = lookup.corpus
        self.max_ngram = lookup.max_ngram
        self.known_tokens = lookup.known_tokens
        self.index = NGramIndex(lookup.max_ngram)
        self.end: Tokens = ()
        """The last `max_ngram` tokens."""
        self.known = row.start
        """How much of the row was read."""
        # How often a run of each length was known to go on, and how often with one of the tokens known for it.
        self.tried = [PRIOR_WEIGHT] * lookup.max_ngram
        self.right = [PRIOR_WEIGHT * PRIOR[min(n, len(PRIOR) - 1)] for n in range(lookup.max_ngram)]
        for token in row.prompt.tolist():
            self._append(token)

    def catch_up(self) -> None:
        """Read what was accepted, and learn from it what runs of each length are worth."""
        for token in self.row.ids[self.known : self.row.length].tolist():
            length, followers = self._longest_match(())
            if length:
                self.tried[length - 1] += 1
                self.right[length - 1] += token in followers
            self._append(token)
        self.known = self.row.length

    def continuations(self, path: Tokens) -> Continuations:
        """What may follow the text and `path` behind it.

        A token's chance is that of any known one, for a run of this length, times its share of what was seen there.
        How deep the path lies needs no factor of its own: the chance of a path is the product along it.
        """
        length, followers = self._longest_match(path)
        if not length:
            return {}
        reliability = self.right[length - 1] / self.tried[length - 1]
        seen = sum(followers.values())
        # Of equally frequent ones the latest first.
        frequent = sorted(reversed(followers.items()), key=lambda follower: -follower[1])
        return {
            token: reliability * count / seen
            for token, count in frequent
            if self.known_tokens is None or token < self.known_tokens
        }

    def _longest_match(self, path: Tokens) -> tuple[int, Followers]:
        """The longest run at the end that was seen before, and what followed it; (0, {}) if there is none."""
        end = (*self.end, *path)[-self.max_ngram :]
        for length in range(len(end), 0, -1):
            own, others = self.index.after(end[-length:]), self.corpus.after(end[-length:])
            if own and others:
                return length, {token: others.get(token, 0) + own.get(token, 0) for token in (others | own)}
            if own or others:
                return length, own or others
        return 0, {}

    def _append(self, token: int) -> None:
        self.index.add(self.end, token)
        self.end = (*self.end, token)[-self.max_ngram :]


def _indexed(corpus: Iterable[Sequence[int]], vocab_size: int | None, max_ngram: int) -> NGramIndex:
    """Check a corpus and index it."""
    if vocab_size is None:
        raise ValueError("a corpus is given without vocab_size; give the target's, so that its ids can be checked")
    texts = [list(map(int, text)) for text in corpus]
    ids = [token for text in texts for token in text]
    if not ids:
        raise ValueError("the corpus holds no tokens; give texts as lists of token ids, or leave it out (None)")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"the corpus holds token id {wrong}, but the vocabulary goes from 0 to {vocab_size - 1}; tokenise it with "
            "the target's tokenizer"
        )
    return NGramIndex.of_texts(texts, max_ngram)
