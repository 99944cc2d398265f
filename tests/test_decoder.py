"""Decoding with heads gives what plain greedy decoding gives. The reference is always Hugging Face's own `generate`."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from tiny import CONFIGS, VOCAB, guide, hf_greedy, prompt_of, shared_model, tiny_medusa, tiny_model
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from medusa import CandidateTree, MedusaModel
from medusa.inference import DecodingStats, MedusaDecoder
from medusa.tree_search import search_tree

pytestmark = pytest.mark.decoding

DTYPES = [torch.float64, torch.float32]
K = 3
NEW = 1 + 4 * (K + 1)  # the prefill's token and four steps in which every guess is right
PROMPT_LENGTHS = (1, 5, 13)  # the sliding windows look back 8: inside, crossing during the answer, past it at once
CHAIN = CandidateTree.chain(K)
BRANCHING = CandidateTree.from_paths(
    path for depth in range(1, K + 1) for path in itertools.product(range(2), repeat=depth)
)


@cache
def expected(name: str, dtype: torch.dtype, attention: str, prompt_length: int, new_tokens: int) -> Tensor:
    return hf_greedy(shared_model(name, dtype, attention), prompt_of(prompt_length), new_tokens)


def all_texts(name: str, dtype: torch.dtype, attention: str = "sdpa") -> list[Tensor]:
    """What guided heads must know: the answers, and as many tokens more as the last step looks ahead."""
    return [expected(name, dtype, attention, length, NEW + K) for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_random_heads_do_not_change_the_output(name: str, dtype: torch.dtype) -> None:
    medusa = tiny_medusa(
        shared_model(name, dtype), num_heads=K, num_layers=2, root_conditioned=True, draft_vocab=range(5, 60)
    )
    for tree in (CHAIN, BRANCHING):
        decoder = MedusaDecoder(medusa, tree)
        for text in all_texts(name, dtype):
            prompt = text[:, : text.shape[1] - NEW - K]
            result = decoder.generate(prompt, max_new_tokens=NEW)
            assert result.sequences.tolist() == text[:, :-K].tolist()
            assert result.stats.new_tokens == NEW
            assert result.stats.finish_reason == "length"


@pytest.mark.parametrize("sees", [None, "root_conditioned", "sequential"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)], ids=["full", "draft"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_every_kind_of_head_decodes(
    projection: str, draft_vocab: range | None, num_layers: int, sees: str | None
) -> None:
    medusa = tiny_medusa(
        shared_model("gemma3"),
        num_heads=K,
        projection=projection,
        draft_vocab=draft_vocab,
        num_layers=num_layers,
        **({} if sees is None else {sees: True}),
    )
    text = expected("gemma3", torch.float64, "sdpa", 5, NEW + K)
    result = MedusaDecoder(medusa, BRANCHING).generate(text[:, :5], max_new_tokens=NEW)
    assert result.sequences.tolist() == text[:, :-K].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_perfect_heads_fill_every_step(name: str, dtype: torch.dtype, attention: str) -> None:
    texts = all_texts(name, dtype, attention)
    medusa = guide(tiny_medusa(shared_model(name, dtype, attention), num_heads=K), texts)
    decoder = MedusaDecoder(medusa, CHAIN)
    for text in texts:
        result = decoder.generate(text[:, : text.shape[1] - NEW - K], max_new_tokens=NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        assert result.stats.accepted == [K] * 4
        assert result.stats.steps == 4
        assert result.stats.tokens_per_step == K + 1


def test_sequential_heads_are_shown_the_path_they_go_on_from() -> None:
    """The right guess is the first or the second of each head, and a head that is shown another path is wrong."""
    texts = all_texts("gemma3", torch.float64)
    medusa = tiny_medusa(shared_model("gemma3"), num_heads=K, sequential=True)
    guide(medusa, texts, rank=lambda t, k: (t + k) % 2)
    decoder = MedusaDecoder(medusa, BRANCHING)
    for text in texts:
        result = decoder.generate(text[:, : text.shape[1] - NEW - K], max_new_tokens=NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        assert result.stats.accepted == [K] * 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_accepted_path_may_run_through_any_branch(name: str, dtype: torch.dtype, attention: str) -> None:
    """The right guess is the first, the second or not in the tree, so rows of the cache must move."""
    texts = all_texts(name, dtype, attention)
    shared = shared_model(name, dtype, attention)

    medusa = guide(tiny_medusa(shared, num_heads=K), texts, rank=lambda t, k: (t + k) % 2)
    decoder = MedusaDecoder(medusa, BRANCHING)
    for text in texts:
        result = decoder.generate(text[:, : text.shape[1] - NEW - K], max_new_tokens=NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        assert result.stats.accepted == [K] * 4

    erratic = guide(tiny_medusa(shared, num_heads=K), texts, rank=lambda t, k: (3 * t + 5 * k) % 7 % 3)
    decoder = MedusaDecoder(erratic, BRANCHING)
    lengths = set()
    for text in texts:
        result = decoder.generate(text[:, : text.shape[1] - NEW - K], max_new_tokens=NEW)
        assert result.sequences.tolist() == text[:, :-K].tolist()
        lengths.update(result.stats.accepted)
    assert len(lengths) > 2, "the ranks above are meant to give accepted paths of several lengths"


def test_root_alone_is_a_tree() -> None:
    text = expected("llama", torch.float64, "sdpa", 5, NEW + K)
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    result = MedusaDecoder(medusa, CandidateTree(())).generate(text[:, :5], max_new_tokens=NEW)
    assert result.sequences.tolist() == text[:, :-K].tolist()
    assert result.stats.tokens_per_step == 1


def test_cut_in_the_middle_of_a_step() -> None:
    """Every length from one token on: the last block is cut, not rounded."""
    texts = all_texts("llama", torch.float64)
    decoder = MedusaDecoder(guide(tiny_medusa(shared_model("llama"), num_heads=K), texts), CHAIN)
    text = texts[1]
    for new in range(1, NEW + 1):
        result = decoder.generate(text[:, :5], max_new_tokens=new)
        assert result.sequences.tolist() == text[:, : 5 + new].tolist()
        assert result.stats.new_tokens == new
        assert result.stats.steps == -(-(new - 1) // (K + 1))


def test_one_token_takes_no_step() -> None:
    result = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), CHAIN).generate(prompt_of(5), 1)
    assert result.stats.steps == 0
    assert result.stats.accepted == []
    assert result.stats.tokens_per_step == 0
    assert result.sequences.shape == (1, 6)


# A model that is a table: the next token depends on the last one only. S A B C EOS D E, then E for ever.
S, A, B, C, EOS, D, E = range(1, 8)


def table_model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.zero_()  # attention and MLP add nothing
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        for now, following in itertools.pairwise((S, A, B, C, EOS, D, E, E)):
            model.lm_head.weight[following, now] = 1
    return model


def table_decoder() -> MedusaDecoder:
    medusa = tiny_medusa(table_model(), num_heads=K)
    guide(medusa, [torch.tensor([[S, A, B, C, EOS, D, E]])])
    return MedusaDecoder(medusa, CHAIN)


@pytest.mark.parametrize(
    ("eos", "new", "answer", "reason"),
    [
        (EOS, 10, [A, B, C, EOS], "stop"),
        (EOS, 2, [A, B], "length"),
        (EOS, 3, [A, B, C], "length"),
        (EOS, 4, [A, B, C, EOS], "stop"),
        ([EOS, B], 10, [A, B], "stop"),
        ([15, EOS], 10, [A, B, C, EOS], "stop"),
        ([A], 10, [A], "stop"),
        ([15], 6, [A, B, C, EOS, D, E], "length"),
        (None, 6, [A, B, C, EOS, D, E], "length"),
    ],
)
@pytest.mark.parametrize("where", ["argument", "generation config"])
def test_nothing_after_the_end(
    eos: int | list[int] | None, new: int, answer: list[int], reason: str, where: str
) -> None:
    decoder = table_decoder()
    prompt = torch.tensor([[S]])
    given: dict[str, Any] = {"eos_token_id": eos}
    if where == "generation config":
        assert decoder.model.model.generation_config is not None
        decoder.model.model.generation_config.eos_token_id = eos
        given = {}
    result = decoder.generate(prompt, max_new_tokens=new, **given)
    assert result.sequences.tolist() == [[S, *answer]]
    assert result.stats.new_tokens == len(answer)
    assert result.stats.finish_reason == reason
    assert [token for block in decoder.stream(prompt, new, **given) for token in block] == answer
    assert hf_greedy(decoder.model.model, prompt, new, eos_token_id=eos).tolist() == [[S, *answer]]


@pytest.mark.parametrize(("prompt_length", "context"), [(5, 24), (23, 24), (1, 9)])
@pytest.mark.parametrize("tree", [CHAIN, BRANCHING], ids=["chain", "branching"])
def test_up_to_the_end_of_the_context(prompt_length: int, context: int, tree: CandidateTree) -> None:
    """Learned positions have no row past the end: the last trees reach over it, the answer must not."""
    torch.manual_seed(0)
    model = type(shared_model("gpt2"))(GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "n_positions": context}))
    model.load_state_dict(
        {
            name: tensor[:context] if name.endswith("wpe.weight") else tensor
            for name, tensor in tiny_model("gpt2").state_dict().items()
        }
    )
    model = model.double().eval()
    prompt = prompt_of(prompt_length)
    text = hf_greedy(model, prompt, context - prompt_length, eos_token_id=None)
    medusa = guide(tiny_medusa(model, num_heads=K), [text], rank=lambda t, k: t % tree.top_k)
    result = MedusaDecoder(medusa, tree).generate(prompt, max_new_tokens=1000, eos_token_id=None)
    assert result.sequences.tolist() == text.tolist()
    assert result.stats.finish_reason == "length"
    assert result.stats.new_tokens == context - prompt_length


def test_prompt_that_fills_the_context_is_refused() -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("gpt2"), num_heads=K), CHAIN)
    with pytest.raises(ValueError, match=r"256 tokens.*context holds 256.*at most 255"):
        decoder.generate(prompt_of(256))


def test_stream_gives_the_blocks_of_generate() -> None:
    texts = all_texts("mistral", torch.float64)
    medusa = guide(tiny_medusa(shared_model("mistral"), num_heads=K), texts, rank=lambda t, k: (t + k) % 3)
    decoder = MedusaDecoder(medusa, BRANCHING)
    result = decoder.generate(texts[1][:, :5], max_new_tokens=NEW)
    stats = DecodingStats()
    blocks = list(decoder.stream(texts[1][:, :5], max_new_tokens=NEW, stats=stats))
    assert [token for block in blocks for token in block] == result.sequences[0, 5:].tolist()
    assert len(blocks) == 1 + stats.steps
    assert all(blocks), "a block without tokens"
    assert stats.accepted == result.stats.accepted
    assert [len(block) for block in blocks[1:-1]] == [accepted + 1 for accepted in stats.accepted[:-1]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_the_backbone_stays_usable(name: str, attention: str) -> None:
    """Between two steps of a stream that nobody finishes, and afterwards, the model is a plain model."""
    texts = all_texts(name, torch.float64, attention)
    shared = shared_model(name, torch.float64, attention)
    decoder = MedusaDecoder(guide(tiny_medusa(shared, num_heads=K), texts, lambda t, k: (t + k) % 2), BRANCHING)
    text, other = texts[1][0, :-K].tolist(), texts[2][:, :-K].tolist()
    stream = decoder.stream(texts[1][:, :5], max_new_tokens=NEW)
    got = [next(stream), next(stream)]
    assert not torch.is_inference_mode_enabled(), "the mode of the decoder leaks to the caller"
    assert hf_greedy(shared, texts[2][:, :13], NEW).tolist() == other
    got.append(next(stream))
    assert decoder.generate(texts[2][:, :13], NEW).sequences.tolist() == other  # a second request in between
    got += stream
    assert [token for block in got for token in block] == text[5:]
    stream = decoder.stream(texts[1][:, :5], max_new_tokens=NEW)
    next(stream), next(stream)
    stream.close()
    assert hf_greedy(shared, texts[2][:, :13], NEW).tolist() == other
    loss = shared(input_ids=texts[1], labels=texts[1]).loss
    loss.backward()  # gradients still flow
    shared.zero_grad()


def test_one_model_serves_two_threads() -> None:
    texts = all_texts("gemma3", torch.float64)
    medusa = guide(tiny_medusa(shared_model("gemma3"), num_heads=K), texts, lambda t, k: (t + k) % 2)
    shared_decoder = MedusaDecoder(medusa, BRANCHING)
    chain = guide(tiny_medusa(shared_model("gemma3"), num_heads=K), texts)
    decoders = [shared_decoder, shared_decoder, MedusaDecoder(chain, CHAIN)]

    def decode(i: int) -> list[list[int]]:
        text = texts[i % 3]
        return decoders[i % 3].generate(text[:, : text.shape[1] - NEW - K], NEW).sequences.tolist()

    with ThreadPoolExecutor(2) as pool:
        for i, sequence in enumerate(pool.map(decode, range(9))):
            assert sequence == texts[i % 3][:, :-K].tolist()


def test_tree_may_be_a_list_in_any_order() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    paths = [list(path) for path in BRANCHING.paths]
    shuffled = [paths[i] for i in torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))]
    assert shuffled != paths
    for tree in (BRANCHING, paths, shuffled):
        assert MedusaDecoder(medusa, tree).tree == BRANCHING


def test_auto_takes_a_searched_tree() -> None:
    texts = all_texts("llama", torch.float64)
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    ranks = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 1, 0]])
    medusa.searched_tree = search_tree(ranks, max_nodes=8)
    decoder = MedusaDecoder(medusa)
    assert decoder.tree in [medusa.searched_tree.best(size) for size in (1, 2, 3, 4, 6, 8)]
    assert decoder.generate(texts[0][:, :1], NEW).sequences.tolist() == texts[0][:, :-K].tolist()


def test_auto_without_a_searched_tree_warns_and_takes_the_chain() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K)
    with pytest.warns(UserWarning, match="medusa tree") as caught:
        decoder = MedusaDecoder(medusa)
    assert decoder.tree == CHAIN
    assert caught[0].filename == __file__, "the warning must point at the caller"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "best"}, "'best'.*'auto'"),
        ({"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]}, "4 levels.*3 heads"),
        ({"tree": [(20,)]}, "rank 20.*20 tokens"),
        ({"tree": [(0, 0)]}, r"\(0, 0\) has no parent"),
        ({"acceptance": "nucleus"}, "'nucleus'.*'exact', 'typical'"),
        ({"proposal": "random"}, "'random'.*'top_k', 'sampled', 'mixed'"),
        ({"acceptance": "typical", "proposal": "mixed"}, "'mixed' is for exact acceptance"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=K, draft_vocab=range(20))
    with pytest.raises(ValueError, match=message):
        MedusaDecoder(medusa, **{"tree": CHAIN, **options})


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"shape \(3,\)"),
        ({"input_ids": torch.ones(1, 3)}, "float32"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "prompt is empty"),
        ({"input_ids": torch.tensor([[1, VOCAB]])}, f"token id {VOCAB}.*0 to {VOCAB - 1}"),
        ({"input_ids": torch.tensor([[1, -1]])}, "token id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_requests_are_refused(request_: dict[str, object], message: str) -> None:
    decoder = MedusaDecoder(tiny_medusa(shared_model("llama"), num_heads=K), CHAIN)
    with pytest.raises(ValueError, match=message):
        decoder.generate(**{"input_ids": torch.ones(1, 3, dtype=torch.long), **request_})


def test_stats_count_what_was_emitted() -> None:
    stats = DecodingStats(new_tokens=9, steps=4, prefill_seconds=1.0, decode_seconds=2.0)
    assert stats.tokens_per_step == 2
    assert stats.tokens_per_second == 3
    assert dataclasses.replace(stats, steps=0).tokens_per_step == 0


def test_prompt_of_int32_ids() -> None:
    medusa: MedusaModel = tiny_medusa(shared_model("llama"), num_heads=K)
    result = MedusaDecoder(medusa, CHAIN).generate(prompt_of(5).int(), 4)
    assert result.sequences[0, :5].tolist() == prompt_of(5)[0].tolist()
