"""Look-up proposes what followed before, and changes nothing about what is said. V vocabulary, N nodes."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import test_exactness
import torch
from enumeration import assert_same_law, law
from test_batches import padded
from test_walk import PROCESSORS, SOME, Case, in_double, plainly_written, text_of
from test_walk import V as TABLE_VOCAB
from tiny import VOCAB, hf_greedy, prompt_of, shared_model
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from medusa.inference import DecodingStats, Lookup, MedusaDecoder, StepSizes, walk
from medusa.inference.accept import NO_TOKEN, accept_fixed
from medusa.inference.draws import Draws
from medusa.inference.lookup import PRIOR, WrittenText
from medusa.inference.ngrams import MAX_FOLLOWERS, NGramIndex
from medusa.inference.proposer import DecodingState
from medusa.inference.request import Row
from medusa.inference.walk import walk_exact

pytestmark = pytest.mark.decoding
__all__ = ["in_double"]  # a fixture

NEW = 24
LENGTHS = (1, 5, 13)


def written(prompt: list[int], lookup: Lookup) -> WrittenText:
    return WrittenText(Row.greedy(torch.tensor(prompt), 50), lookup)


def write(text: WrittenText, tokens: list[int]) -> None:
    for token in tokens:
        text.row.emit(token, torch.empty(0), torch.empty(0))
    text.catch_up()


def best_chain(text: WrittenText, length: int) -> list[int]:
    path: tuple[int, ...] = ()
    while len(path) < length and (after := text.continuations(path)):
        path = (*path, next(iter(after)))
    return list(path)


# What is remembered


@pytest.mark.parametrize("max_ngram", [1, 2, 4])
def test_the_index_counts_what_followed(max_ngram: int) -> None:
    generator = random.Random(max_ngram)
    texts = [[generator.randrange(5) for _ in range(n)] for n in (0, 1, 40, 60)]
    index = NGramIndex.of_texts(texts, max_ngram)
    for n in range(1, max_ngram + 1):
        runs = {tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)}
        for run in runs:
            followed = Counter(
                text[i + n] for text in texts for i in range(len(text) - n) if tuple(text[i : i + n]) == run
            )
            assert index.after(run) == followed
    assert index.after((9,) * max_ngram) == {}


def test_followers_not_seen_for_longest_make_room() -> None:
    text = [token for follower in [0, *range(1, 20), 5] for token in (99, follower)]
    followers = NGramIndex.of_texts([text], 1).after((99,))
    assert len(followers) == MAX_FOLLOWERS
    assert list(followers)[-2:] == [19, 5]


def test_a_repeated_token_makes_no_work() -> None:
    lookup = Lookup(8, max_ngram=4, corpus=[[7] * 5000], vocab_size=8)
    assert len(lookup.corpus._followers) == 4
    assert best_chain(written([1, 7], lookup), 7) == [7] * 7


def test_the_longest_run_decides() -> None:
    text = written([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], Lookup(16, max_ngram=3))
    assert list(text.continuations(())) == [9], "1 2 3 was followed by 9, though 2 3 was by 8 last"
    short = written([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], Lookup(16, max_ngram=2))
    assert list(short.continuations(())) == [8, 9], "as often, and later"
    assert best_chain(text, 4) == [9, 2, 3, 8], "goes on behind guesses; 9 2 3 was followed by 8"
    assert written([1, 2, 3], Lookup(16)).continuations(()) == {}


def test_frequent_continuations_come_first() -> None:
    after = written([5, 1, 5, 1, 5, 2, 5], Lookup(16)).continuations(())
    assert list(after) == [1, 2]
    assert after[1] == pytest.approx(PRIOR[0] * 2 / 3)


def test_the_corpus_counts_with_the_text() -> None:
    lookup = Lookup(16, max_ngram=3, corpus=[[4, 5, 6], [4, 5, 6], [5, 9]], vocab_size=10)
    assert list(written([1, 4, 5], lookup).continuations(())) == [6]
    assert list(written([5, 7, 1, 5], lookup).continuations(())) == [6, 7, 9]
    assert written([3], lookup).continuations(()) == {}


def test_runs_are_worth_what_they_were_worth_in_this_text() -> None:
    kept = written([1, 2] * 3, Lookup(16, max_ngram=1))
    write(kept, [1, 2] * 10)
    assert kept.continuations(())[1] == pytest.approx((10 * PRIOR[0] + 20) / 30)
    broken = written([1, 2] * 3, Lookup(16, max_ngram=1))
    write(broken, [1, 9, 1, 8, 1, 7, 1])
    assert kept.continuations(())[1] > PRIOR[0]
    assert sum(broken.continuations(()).values()) < PRIOR[0]


# Decoding


def texts_of(name: str) -> list[Tensor]:
    return [hf_greedy(shared_model(name), prompt_of(length, seed=7), NEW) for length in LENGTHS]


def lookup_of(texts: list[Tensor], **options: Any) -> Lookup:
    """Knows the answers, and a wrong turn at every place."""
    corpus = [text[0].tolist() for text in texts]
    wrong = [token for text in corpus for pair in itertools.pairwise(text) for token in (*pair, pair[0])]
    return Lookup(
        **{"num_nodes": 12, "max_ngram": 3, "corpus": [wrong, *corpus, *corpus], "vocab_size": VOCAB, **options}
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_greedy_output_is_that_of_generate(name: str) -> None:
    texts = texts_of(name)
    ids, mask = padded([text[:, :-NEW] for text in texts], "left")
    for lookup in (Lookup(16), lookup_of(texts)):
        decoder = MedusaDecoder(shared_model(name), proposer=lookup)
        result = decoder.generate(ids, NEW, attention_mask=mask)
        for row, text in zip(result.sequences, texts, strict=True):
            assert row[-NEW:].tolist() == text[0, -NEW:].tolist()
            assert decoder.generate(text[:, :-NEW], NEW).sequences.tolist() == text.tolist()
    assert result.stats.tokens_per_step > 2
    assert len({tuple(stats.accepted) for stats in result.row_stats}) > 1


def test_every_way_to_end() -> None:
    """Limits and end tokens inside a block; streams; transformers' own loop."""
    text = texts_of("llama")[1]
    prompt, model = text[:, :-NEW], shared_model("llama")
    decoder = MedusaDecoder(model, proposer=lookup_of([text]))
    for new in range(1, NEW + 1):
        assert decoder.generate(prompt, new).sequences.tolist() == text[:, : prompt.shape[1] + new].tolist()
        end = int(text[0, prompt.shape[1] + new - 1])
        expected = hf_greedy(model, prompt, NEW, eos_token_id=end).tolist()
        assert decoder.generate(prompt, NEW, eos_token_id=end).sequences.tolist() == expected
    stats = DecodingStats()
    blocks = list(decoder.stream(prompt, NEW, stats=stats))
    assert [token for block in blocks for token in block] == text[0, -NEW:].tolist()
    assert len(blocks) == 1 + stats.steps < NEW
    options: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    assert model.generate(prompt, custom_generate=decoder, **options).tolist() == text.tolist()


@pytest.mark.parametrize("penalty", [1.3, 2.0])
def test_processors_see_what_they_would_see(penalty: float) -> None:
    model, prompt = shared_model("llama"), prompt_of(9)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    expected = hf_greedy(model, prompt, NEW, logits_processor=processors)
    decoder = MedusaDecoder(model, proposer=lookup_of([expected]))
    result = decoder.generate(prompt, NEW, logits_processor=processors)
    assert result.sequences.tolist() == expected.tolist()
    assert result.stats.tokens_per_step > 2


def test_threads_share_a_decoder() -> None:
    texts = texts_of("gemma3")
    decoder = MedusaDecoder(shared_model("gemma3"), proposer=lookup_of(texts))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: decoder.generate(texts[i % 3][:, :-NEW], NEW), range(6)))
    for i, result in enumerate(found):
        assert result.sequences.tolist() == texts[i % 3].tolist()
        assert result.stats.accepted == found[i % 3].stats.accepted, "nothing is learned from one request for another"


def test_without_a_match_the_root_goes_alone() -> None:
    decoder = MedusaDecoder(shared_model("llama"), proposer=Lookup(16))
    sizes: list[int] = []
    propose = decoder.propose

    def watching(state: DecodingState) -> Any:
        candidates, layout = propose(state)
        sizes.append(layout.num_nodes)
        return candidates, layout

    decoder.propose = watching  # type: ignore[method-assign]
    decoder.generate(torch.tensor([[5, 6, 7, 8]]), NEW)
    assert sizes[0] == 1
    assert set(sizes) <= set(Lookup(16).sizes)


# The distribution of texts


@dataclass(frozen=True)
class LookupCase(Case):
    """What the table says of a text is looked up: prompt, corpus and text so far; it learns on the way."""

    lookup: Lookup = Lookup(6, 2, corpus=[[1, 2, 3, 1, 2, 1, 3, 2, 3, 0], [2, 2, 3]], vocab_size=TABLE_VOCAB)  # noqa: RUF009

    def written(self, draws: Draws) -> tuple[int, ...]:
        """A whole text."""
        row = self.row()
        drafting = self.lookup.start([row])
        while row.finish_reason is None:
            state = DecodingState([row], None, None, row.ids[row.length - 1 : row.length], None, draws, drafting)  # type: ignore[arg-type]
            candidates, layout = drafting.propose(state)
            assert layout.num_nodes > 1
            logits = self.language.tree_logits(text_of(row), candidates.tokens[0].tolist(), layout)
            self.walk([row], candidates, logits, layout, draws)
        return text_of(row)

    def check(self) -> None:
        """Assert that texts are distributed as by plain decoding."""
        assert_same_law(law(self.written), law(lambda draws: plainly_written(self, draws)))


@pytest.mark.parametrize("new", [2, 4])
def test_looking_up_leaves_the_text_as_it_is(new: int) -> None:
    LookupCase(new=new).check()


@pytest.mark.parametrize("name", SOME)
def test_looking_up_with_processors(name: str) -> None:
    LookupCase(processors=PROCESSORS[name]).check()


def follow_the_first(p: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Likely guesses are taken without a throw of the dice."""
    token, child = accept_fixed(p, children, draws)
    if children.shape[1] == 0:
        return token, child
    sure = (children[:, 0] != NO_TOKEN) & (p.gather(1, children[:, :1].clamp(min=0))[:, 0] > 0.1)
    return torch.where(sure, children[:, 0], token), torch.where(sure, 0, child)


def drawn_anew(p: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """What no child carries is drawn a second time."""
    token, child = accept_fixed(p, children, draws)
    return torch.where(child == NO_TOKEN, draws.categorical(p), token), child


@pytest.mark.parametrize("rule", [follow_the_first, drawn_anew])
def test_wrong_rules_fail(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    monkeypatch.setattr(walk, "accept_fixed", rule)
    with pytest.raises(AssertionError, match="instead of"):
        LookupCase(new=2).check()
    with pytest.raises(AssertionError, match="p-value"):
        test_exactness.check(sampling_decoder(), 1500, 1.0, 0.8)


def test_logits_of_another_node_fail() -> None:
    def shifted(rows: Any, candidates: Any, logits: Tensor, layout: Any, draws: Draws) -> list[list[int]]:
        return walk_exact(rows, candidates, logits[:, :1].expand_as(logits), layout, draws)

    with pytest.raises(AssertionError, match="instead of"):
        replace(LookupCase(), walk=shifted).check()


def sampling_decoder() -> MedusaDecoder:
    generator = random.Random(0)
    corpus = [[generator.randrange(test_exactness.V) for _ in range(60)]]
    lookup = Lookup(6, 2, corpus=corpus, vocab_size=test_exactness.V)
    return MedusaDecoder(test_exactness.small_model(), proposer=lookup)


def test_samples_are_distributed_as_the_backbones() -> None:
    test_exactness.check(sampling_decoder(), 2000, 1.0, 0.8)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes is 0.*give 1 or more"),
        ({"max_ngram": 0}, "max_ngram is 0"),
        ({"min_chance": 0.0}, "min_chance is 0.0"),
        ({"corpus": [], "vocab_size": 9}, "corpus holds no tokens"),
        ({"corpus": [[]], "vocab_size": 9}, "corpus holds no tokens"),
        ({"corpus": [[1, 2]]}, "without vocab_size"),
        ({"corpus": [[1, 9]], "vocab_size": 9}, "token id 9, but the vocabulary goes from 0 to 8"),
        ({"corpus": [[-1]], "vocab_size": 9}, "token id -1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookup(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, "give 1"),
        ({"sizes": (2, 4)}, "give 1"),
        ({"sizes": (1, 4, 2)}, "give 1"),
        ({"sizes": (1, 2), "seconds": (1.0, 2.0)}, "give both"),
        ({"sizes": (1, 2), "seconds": (1.0,), "tokens_per_second": 1.0}, "one for each of the 2 sizes"),
        ({"sizes": (1,), "seconds": (0.0,), "tokens_per_second": 1.0}, "must be positive"),
        ({"sizes": (1,), "seconds": (1.0,), "tokens_per_second": 0.0}, "tokens_per_second is 0.0"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepSizes(**options)


def test_one_node_is_plain_decoding() -> None:
    text = texts_of("llama")[1]
    result = MedusaDecoder(shared_model("llama"), proposer=lookup_of([text], num_nodes=1)).generate(text[:, :-NEW], NEW)
    assert result.sequences.tolist() == text.tolist()
    assert result.stats.tokens_per_step == 1
