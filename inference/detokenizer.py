"""Token ids to text while they come."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to until the last one of their character is there; in some tokenizers, all bytes before it too."""
CONTEXT = 8
"""Tokens to decode new ones with: some tokenizers write a token differently at the start of a text."""


class Detokenizer:
    """Decodes a growing list of tokens piece by piece.

    No piece ends inside a character, together they are the text of all tokens, and a piece costs a window of some
    tokens, however long the text has become.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were returned already."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window += ids
        text = self._decode(self._window)
        finished = len(text.rstrip(UNFINISHED))
        piece = text[self._shown : finished]
        self._shown = max(self._shown, finished)
        if len(self._window) > 2 * CONTEXT:
            self._shorten(text)
        return piece

    def end(self) -> str:
        """What was held back, though no token will complete it."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        return piece

    def _shorten(self, text: str) -> None:
        """Forget all but the last tokens of the window, whose text is `text`, unless they start inside a character."""
        recent = self._window[-CONTEXT:]
        end, waiting = self._decode(recent), len(text) - self._shown
        if len(end) > waiting and text.endswith(end):
            self._window, self._shown = recent, len(end) - waiting

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change text that was shown already.
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
