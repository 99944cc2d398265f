"""What followed each short run of tokens in a text: an index that grows with the text."""

from collections.abc import Iterable, Sequence

Followers = dict[int, int]
"""How often each token came next, the one seen last at the end."""

MAX_FOLLOWERS = 8
"""So many are remembered of each run; the one not seen for longest makes room."""


class NGramIndex:
    """Which tokens followed every run of 1 to `max_ngram` tokens.

    A token costs `max_ngram` entries of a hash table to add and as many look-ups to ask for, however long and however
    repetitive the text is; the table takes about 300 bytes for each run that is new.
    """

    def __init__(self, max_ngram: int) -> None:
        """Start empty."""
        self.max_ngram = max_ngram
        self._followers: dict[tuple[int, ...], Followers] = {}

    @classmethod
    def of_texts(cls, texts: Iterable[Sequence[int]], max_ngram: int) -> "NGramIndex":
        """Index several texts; no run goes from one into the next."""
        index = cls(max_ngram)
        for text in texts:
            before: tuple[int, ...] = ()
            for token in text:
                index.add(before, token)
                before = (*before, token)[-max_ngram:]
        return index

    def add(self, before: tuple[int, ...], token: int) -> None:
        """Take note that `token` followed the text that ends in `before`."""
        for n in range(1, min(len(before), self.max_ngram) + 1):
            followers = self._followers.setdefault(before[-n:], {})
            followers[token] = followers.pop(token, 0) + 1  # to the end: seen last
            if len(followers) > MAX_FOLLOWERS:
                del followers[next(iter(followers))]

    def after(self, run: tuple[int, ...]) -> Followers:
        """What followed exactly this run; to be read only."""
        return self._followers.get(run, {})
