"""Whether two models speak with the same token ids."""

from medusa.model import Tokenizer

SHOWN = 5
"""Differing entries that a refusal names."""


def known_ids(tokenizer: Tokenizer) -> int:
    """Ids from here on are padding of the LM head."""
    return max(tokenizer.get_vocab().values()) + 1


def check_same_vocabulary(tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
    """Refuse a draft whose ids mean other tokens, special ones included.

    Raises:
        ValueError: the entries that differ.
    """
    vocab, other = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    differing = sorted(token for token in vocab.keys() | other.keys() if vocab.get(token) != other.get(token))
    if differing:
        shown = [f"{t!r} is {vocab.get(t, 'missing')} and {other.get(t, 'missing')}" for t in differing[:SHOWN]]
        raise ValueError(
            f"the target's and the draft's tokenizers differ in {len(differing)} entries ({'; '.join(shown)}"
            f"{', ...' if len(differing) > SHOWN else ''}); use a draft that was made with the target's tokenizer"
        )
