"""Pieces of text against the text decoded at once."""

import random
from typing import Any

import pytest
from chatml import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa.inference.detokenizer import CONTEXT, Detokenizer

SAMPLES = ("plain text, and more", "naïve café ÄÖÜ", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🇦🇶", "a\nb\r\n\tc", "�")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def pieces(tokenizer: Any, ids: list[int], cuts: random.Random) -> list[str]:
    """Decode in groups of 1 to 5 tokens."""
    detokenizer = Detokenizer(tokenizer)
    found = []
    while ids:
        size = cuts.randint(1, 5)
        found.append(detokenizer.add(ids[:size]))
        ids = ids[size:]
    return [*found, detokenizer.end()]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_the_text(seed: int, tokenizer: Any) -> None:
    """Valid text, random bytes and special tokens, mixed: everything that a model can say."""
    chance = random.Random(seed)
    ids: list[int] = []
    for _ in range(chance.randint(1, 12)):
        match chance.randrange(3):
            case 0:
                ids += tokenizer(chance.choice(SAMPLES))["input_ids"]
            case 1:
                ids += [chance.randrange(len(tokenizer)) for _ in range(chance.randint(1, 6))]
            case 2:
                ids += [tokenizer.eos_token_id] * chance.choice((1, 2, 3 * CONTEXT))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, ids, chance)) == text


@pytest.mark.parametrize("sample", SAMPLES[:-1])
def test_no_piece_ends_inside_a_character(sample: str, tokenizer: Any) -> None:
    for seed in range(10):
        found = pieces(tokenizer, tokenizer(sample * 5)["input_ids"], random.Random(seed))
        assert "�" not in "".join(found)
        assert "".join(found) == sample * 5


def test_word_and_byte_tokens_as_llama_has_them() -> None:
    """The first token of a decoded text loses its space there, and every byte that waits is shown for itself."""
    words = ["▁Hello", "▁world", ",", "▁the", "▁end", *(f"<0x{byte:02X}>" for byte in "é日👍".encode())]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = list(range(len(words))) * 4
    for seed in range(10):
        found = pieces(tokenizer, ids, random.Random(seed))
        assert "".join(found) == tokenizer.decode(ids)
        assert "�" not in "".join(found)


def test_a_piece_costs_the_same_however_long_the_text(tokenizer: Any) -> None:
    sizes: list[int] = []

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> Any:
            sizes.append(len(ids))
            return tokenizer.decode(ids, **options)

    pieces(Counting(), tokenizer("日本語 and 🙂" * 50)["input_ids"], random.Random(0))
    assert max(sizes) < 6 * CONTEXT
