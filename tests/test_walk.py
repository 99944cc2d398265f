"""Walking down a verified tree: over all outcomes, the text is distributed as plain decoding's, to 1e-10.

The backbone is a table here, so plain decoding can be enumerated too. V vocabulary, N nodes, K heads.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from enumeration import ScriptedDraws, assert_same_law, law, likeliest, mixed_siblings, outcomes, siblings
from tiny import guide, hf_greedy, prompt_of, random_tree, shared_model, tiny_medusa
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria

from medusa import CandidateTree
from medusa.inference import MedusaDecoder, Typical, accept, walk
from medusa.inference.accept import NO_TOKEN
from medusa.inference.draws import CertainDraws, Draws
from medusa.inference.layout import TreeLayout
from medusa.inference.propose import PROPOSALS, Candidates, Drawn, Proposal
from medusa.inference.request import Row
from medusa.inference.walk import walk_exact, walk_typical
from medusa.inference.warp import processed_scores

pytestmark = pytest.mark.decoding

V, K, EOS = 4, 3, 0
PROMPT = (1, 2)
Text = tuple[int, ...]
Walk = Callable[..., list[list[int]]]
Processors = Callable[[], list[LogitsProcessor]]

ROOT_ONLY = CandidateTree(())
LONE = CandidateTree.chain(1)
CHAIN = CandidateTree.chain(2)
RAGGED = CandidateTree.from_paths([(0,), (1,), (0, 0)])
UNEVEN = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
BRANCHING = CandidateTree.from_paths([(0,), (1,), (2,), *itertools.product(range(3), repeat=2)])
TREES = {
    "root only": ROOT_ONLY,
    "chain": CHAIN,
    "ragged": RAGGED,
    "one branch goes on": CandidateTree.from_paths([(0,), (1,), (1, 0)]),
    "wide": CandidateTree.from_paths([(0,), (1,), (2,), (0, 0)]),
    "random": random_tree(3, nodes=4, depth=3, width=2),
}


@cache
def layout_of(tree: CandidateTree) -> TreeLayout:
    return TreeLayout.of(tree, torch.device("cpu"))


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are fp32, as `generate` computes them; what acceptance makes of them is compared to 1e-10."""
    monkeypatch.setattr(walk, "processed_scores", lambda *given: processed_scores(*given).double())


@dataclass(frozen=True)
class Language:
    """A backbone and heads that are tables: all depends on the last two tokens."""

    seed: int = 0
    left_out: int = 1
    """How many tokens each head gives no probability."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        object.__setattr__(self, "following", torch.randn(V, V, V, generator=generator) * 1.5)
        object.__setattr__(self, "guesses", torch.randn(V, V, K, V, generator=generator))

    def logits(self, text: Text) -> Tensor:
        """After the text, [V]."""
        return self.following[text[-2], text[-1]]  # type: ignore[attr-defined,no-any-return]

    def q(self, text: Text) -> Tensor:
        """What the heads draw from, [K, V]."""
        guesses = self.guesses[text[-2], text[-1]].double()  # type: ignore[attr-defined]
        least = guesses.topk(self.left_out, dim=-1, largest=False).indices
        return guesses.scatter(-1, least, -torch.inf).softmax(dim=-1)

    def candidates(self, text: Text, layout: TreeLayout, proposal: Proposal, draws: Draws) -> Candidates:
        """Fill the tree behind the text's last token, as `propose` and `propose_by_chance` do."""
        q, depths = self.q(text), layout.depths[0].tolist()
        tokens = [text[-1], *[NO_TOKEN] * (layout.num_nodes - 1)]
        drawn: dict[tuple[int, int], list[int]] = {}  # parents at one depth see the same draws
        for node, children in enumerate(layout.children[0]):
            own, count = q[min(depths[node], K - 1)], len(children)
            if proposal == "top_k":
                for child in children:
                    tokens[child] = likeliest(own, V)[int(layout.ranks[0, child])]
            elif count:
                draw = mixed_siblings if proposal == "mixed" else siblings
                key = (depths[node], count)
                drawn[key] = drawn.get(key) or draw(own, count, draws)
                for child, token in zip(children, drawn[key], strict=True):
                    tokens[child] = token
        drawn = None if proposal == "top_k" else Drawn(q[None], layout.depths[0], mixed=proposal == "mixed")
        return Candidates(torch.tensor([tokens]), drawn)

    def tree_logits(self, text: Text, tokens: list[int], layout: TreeLayout) -> Tensor:
        """After every node, [1, N, V]."""
        paths = [[max(tokens[i], 0) for i in nodes_on_the_way(layout, node)] for node in range(layout.num_nodes)]
        return torch.stack([self.logits((*text, *path)) for path in paths])[None]


def no_processors() -> list[LogitsProcessor]:
    return []


@dataclass(frozen=True)
class Case:
    """What is to be written, and how."""

    tree: CandidateTree = RAGGED
    proposal: Proposal = "top_k"
    processors: Processors = no_processors
    new: int = 3
    do_sample: bool = True
    language: Language = field(default_factory=Language)
    walk: Walk = walk_exact

    def row(self, text: Text = PROMPT, processors: list[LogitsProcessor] | None = None) -> Row:
        """The row that goes on from the text."""
        limit = len(PROMPT) + self.new - len(text)
        return Row(
            ids=torch.tensor([*text, *[0] * limit]),
            length=len(text),
            prompt=torch.tensor(text),
            limit=limit,
            processors=LogitsProcessorList(self.processors() if processors is None else processors),
            criteria=StoppingCriteriaList([EosTokenCriteria(EOS)]),
            do_sample=self.do_sample,
        )

    def step(self, row: Row, draws: Draws) -> list[int]:
        """Propose, verify, accept; the first token is chosen without a tree. Returns the accepted path."""
        text = text_of(row)
        layout = layout_of(ROOT_ONLY if len(text) == len(PROMPT) else self.tree)
        candidates = self.language.candidates(text, layout, self.proposal, draws)
        tokens = candidates.tokens[0].tolist()
        logits = self.language.tree_logits(text, tokens, layout)
        (path,) = self.walk([row], candidates, logits, layout, draws)
        emitted = text_of(row)[len(text) :]
        if self.walk is walk_exact:
            assert tuple(tokens[node] for node in path[1:]) == emitted[:-1], "the path is not what was emitted"
        return path


def text_of(row: Row) -> Text:
    return tuple(row.context[0].tolist())


def written(case: Case, draws: Draws) -> Text:
    """A whole text, by steps."""
    row = case.row()
    while row.finish_reason is None:
        case.step(row, draws)
    return text_of(row)


def plainly_written(case: Case, draws: Draws) -> Text:
    """A whole text, token by token: what plain decoding does."""
    processors, text = LogitsProcessorList(case.processors()), PROMPT
    while len(text) < len(PROMPT) + case.new and (text == PROMPT or text[-1] != EOS):
        scores = processors(torch.tensor([text]), case.language.logits(text)[None].clone())
        token = draws.categorical(scores.double().softmax(dim=-1)) if case.do_sample else scores.argmax(dim=-1)
        text = (*text, int(token))
    return text


def law_by_steps(case: Case) -> dict[Text, float]:
    """How texts are distributed. A step depends on nothing but the text before it, so equal texts are taken together.

    Only for processors that keep no memory.
    """

    def one_step(text: Text, draws: Draws) -> tuple[Text, bool]:
        row = case.row(text)
        case.step(row, draws)
        return text_of(row), row.finish_reason is not None

    ended: dict[Text, float] = {}
    going = {PROMPT: 1.0}
    while going:
        text = min(going, key=len)
        reached = going.pop(text)
        for (longer, finished), chance in law(lambda draws, text=text: one_step(text, draws)).items():
            where = ended if finished else going
            where[longer] = where.get(longer, 0.0) + reached * chance
    return ended


def check(case: Case) -> dict[Text, float]:
    """Assert that texts are distributed as by plain decoding."""
    expected = law(lambda draws: plainly_written(case, draws))
    assert_same_law(law_by_steps(case), expected)
    return expected


def distribution_after(case: Case, text: Text) -> Tensor:
    """What plain decoding draws the next token from, [V]."""
    processors = LogitsProcessorList(case.processors())
    return processors(torch.tensor([text]), case.language.logits(text)[None].clone())[0].double().softmax(dim=-1)


def conditionals(case: Case, text: Text, path: list[int]) -> list[Tensor]:
    """Probability of each token of a path behind the text."""
    return [distribution_after(case, (*text, *path[:i]))[token] for i, token in enumerate(path)]


def nodes_on_the_way(layout: TreeLayout, node: int) -> list[int]:
    """From the root, which is left out, to the node."""
    return layout.ancestors[0, node].nonzero()[1:, 0].tolist()


# Exact acceptance


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_any_tree_and_proposal_leaves_the_text_as_it_is(tree: CandidateTree, proposal: Proposal) -> None:
    check(Case(tree, proposal))


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_leave_the_text_as_it_is(seed: int) -> None:
    check(Case(random_tree(seed, nodes=8, depth=3, width=3), new=4, language=Language(seed + 1)))


def test_a_fixed_tree_is_accepted_as_far_as_the_backbone_says_it() -> None:
    """On average as many nodes as the sum of their paths' probabilities: no exact rule accepts more."""
    text = (*PROMPT, 3)
    for seed in range(3):
        case = Case(random_tree(seed, nodes=8, depth=3, width=3), new=9, language=Language(seed))
        layout = layout_of(case.tree)
        tokens = case.language.candidates(text, layout, "top_k", CertainDraws()).tokens[0].tolist()
        expected = 0.0
        for node in range(1, layout.num_nodes):
            path = [tokens[i] for i in nodes_on_the_way(layout, node)]
            if EOS not in path:  # where a text ends, no node is needed to go on from
                expected += float(torch.stack(conditionals(case, text, path)).prod())
        found = outcomes(lambda draws, case=case: len(case.step(case.row(text), draws)) - 1)
        assert sum(accepted * chance for accepted, chance in found) == pytest.approx(expected, abs=1e-10)


class Remembering(LogitsProcessor):
    """A user's own: what it does depends on every call before."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen = 3 * self.seen + int(input_ids.sum())
        return scores + torch.tensor([self.seen // n % 3 for n in range(1, V + 1)])


PROCESSORS: dict[str, Processors] = {
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.6)],
    "top-k": lambda: [hf.TopKLogitsWarper(2)],
    "top-p": lambda: [hf.TopPLogitsWarper(0.7)],
    "top-h": lambda: [hf.TopHLogitsWarper(0.5)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.3)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.6)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.1)],
    "eta": lambda: [hf.EtaLogitsWarper(0.5, device="cpu")],
    "temperature, top-k and top-p": lambda: [
        hf.TemperatureLogitsWarper(1.5),
        hf.TopKLogitsWarper(3),
        hf.TopPLogitsWarper(0.8),
    ],
    "repetition penalty": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.8)],
    "no repeated bigram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[3], [2, 1]], eos_token_id=EOS)],
    "bias": lambda: [hf.SequenceBiasLogitsProcessor([[[3], -1.0], [[2, 1], 2.0]])],
    "min length": lambda: [hf.MinLengthLogitsProcessor(len(PROMPT) + 2, EOS)],
    "min new tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, EOS)],
    "forced end": lambda: [hf.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 3, EOS)],
    "growing wish to end": lambda: [hf.ExponentialDecayLengthPenalty((1, 1.5), EOS, len(PROMPT))],
    "prefix": lambda: [hf.PrefixConstrainedLogitsProcessor(lambda _, text: [EOS, (int(text[-1]) + 1) % V, 3], 1)],
    "suppressed": lambda: [hf.SuppressTokensLogitsProcessor([3])],
    "suppressed at first": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([3], len(PROMPT) + 1)],
    "penalty, then temperature and top-k": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.8),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(3),
    ],
}
SOME = ("temperature, top-k and top-p", "no repeated bigram", "penalty, then temperature and top-k")


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_do_to_the_text_what_they_do_in_plain_decoding(name: str) -> None:
    without = law(lambda draws: plainly_written(Case(), draws))
    changed = check(Case(processors=PROCESSORS[name]))
    with pytest.raises(AssertionError, match="instead of"):
        assert_same_law(changed, without, 1e-3)


@pytest.mark.parametrize("proposal", ["sampled", "mixed"])
@pytest.mark.parametrize("name", SOME)
def test_processors_and_drawn_siblings(name: str, proposal: Proposal) -> None:
    check(Case(RAGGED, proposal, PROCESSORS[name]))


@pytest.mark.parametrize(("tree", "proposal"), [(RAGGED, "top_k"), (LONE, "sampled"), (LONE, "mixed")])
def test_a_processor_with_a_memory_sees_what_it_would_see_in_plain_decoding(
    tree: CandidateTree, proposal: Proposal
) -> None:
    """Whole texts are enumerated, since a step depends on more than the text before it."""
    case = Case(tree, proposal, lambda: [Remembering(), hf.TopKLogitsWarper(2)])
    expected = law(lambda draws: plainly_written(case, draws))
    assert_same_law(law(lambda draws: written(case, draws)), expected)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_at_temperature_zero_the_text_is_the_greedy_one(proposal: Proposal) -> None:
    for name in SOME:
        case = Case(RAGGED, proposal, PROCESSORS[name], do_sample=False)
        expected = plainly_written(case, CertainDraws())
        assert law_by_steps(case) == {expected: pytest.approx(1)}


@pytest.mark.parametrize("seed", range(10))
def test_greedy_steps_go_as_deep_as_the_tree_is_right(seed: int) -> None:
    """Against a walk that steps to the child with the backbone's choice as long as there is one."""
    case = Case(random_tree(seed, nodes=20, depth=K, width=3), new=9, do_sample=False, language=Language(seed))
    layout = layout_of(case.tree)
    for text in itertools.product(range(1, V), repeat=3):
        tokens = case.language.candidates(text, layout, "top_k", CertainDraws()).tokens[0].tolist()
        row = case.row(text)
        path, so_far = [0], text
        while True:
            choice = int(case.language.logits(so_far).argmax())
            right = [node for node in layout.children_of(0, path[-1]) if tokens[node] == choice]
            so_far = (*so_far, choice)
            if not right or choice == EOS:
                break
            path.append(right[0])
        assert case.step(row, CertainDraws()) == path
        assert text_of(row) == so_far


# Walks that are nearly right


def unwarped_root(
    rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, draws: Draws
) -> list[list[int]]:
    """The first token is drawn from the backbone's own logits."""
    if layout.num_nodes > 1:
        return walk_exact(rows, candidates, logits, layout, draws)
    token = draws.categorical(logits[:, 0].double().softmax(dim=-1))
    rows[0].emit(int(token), logits[0, 0], logits[0, 0])
    return [[0]]


def q_of_another_head(
    rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, draws: Draws
) -> list[list[int]]:
    assert candidates.drawn is not None
    drawn = replace(candidates.drawn, q=candidates.drawn.q.roll(1, 1))
    return walk_exact(rows, Candidates(candidates.tokens, drawn), logits, layout, draws)


def logits_of_another_node(
    rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, draws: Draws
) -> list[list[int]]:
    return walk_exact(rows, candidates, logits[:, :1].expand_as(logits), layout, draws)


@pytest.mark.parametrize(
    ("tree", "proposal", "wrong"),
    [
        (RAGGED, "top_k", unwarped_root),
        (CHAIN, "sampled", q_of_another_head),
        (CHAIN, "mixed", q_of_another_head),
        (RAGGED, "top_k", logits_of_another_node),
    ],
)
def test_wrong_walks_fail(tree: CandidateTree, proposal: Proposal, wrong: Walk) -> None:
    processors = PROCESSORS["temperature, top-k and top-p"]
    with pytest.raises(AssertionError, match="instead of"):
        check(Case(tree, proposal, processors, walk=wrong))


def redrawn_from_p(p: Tensor, q: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    token, child = accept.accept_sampled(p, q, children, draws)
    return torch.where(child == NO_TOKEN, draws.categorical(p), token), child


x_stays_in_q = partial(accept.accept_sampled, replacement=True)


@pytest.mark.parametrize(("tree", "wrong"), [(LONE, redrawn_from_p), (RAGGED, x_stays_in_q)])
def test_wrong_rules_fail_in_the_walk(
    monkeypatch: pytest.MonkeyPatch, tree: CandidateTree, wrong: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    monkeypatch.setattr(walk, "accept_sampled", wrong)
    with pytest.raises(AssertionError, match="instead of"):
        check(Case(tree, "sampled", language=Language(1)))


def test_processors_that_see_an_old_text_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(rows: list[Row], contexts: list[Tensor], logits: Tensor) -> Tensor:
        return processed_scores(rows, [context[:, : len(PROMPT) + 1] for context in contexts], logits).double()

    monkeypatch.setattr(walk, "processed_scores", stale)
    with pytest.raises(AssertionError, match="instead of"):
        check(Case(processors=PROCESSORS["repetition penalty"]))


# Several rows


def check_together(cases: list[Case], texts: list[Text]) -> None:
    """Assert that one step of several rows writes what steps of each row alone do, independently of each other."""
    tree, proposal = cases[0].tree, cases[0].proposal
    layout = layout_of(tree)

    def together(draws: Draws) -> tuple[Text, ...]:
        rows = [case.row(text) for case, text in zip(cases, texts, strict=True)]
        filled, logits = [], []
        for case, text in zip(cases, texts, strict=True):
            filled.append(case.language.candidates(text, layout, proposal, draws))
            logits.append(case.language.tree_logits(text, filled[-1].tokens[0].tolist(), layout))
        drawn = [own.drawn for own in filled if own.drawn is not None]
        together = replace(drawn[0], q=torch.cat([own.q for own in drawn])) if drawn else None
        candidates = Candidates(torch.cat([own.tokens for own in filled]), together)
        walk_exact(rows, candidates, torch.cat(logits), layout, draws)
        return tuple(text_of(row) for row in rows)

    def alone(case: Case, text: Text, draws: Draws) -> Text:
        row = case.row(text)
        case.step(row, draws)
        return text_of(row)

    laws = [law(partial(alone, case, text)) for case, text in zip(cases, texts, strict=True)]
    expected = {
        written: math.prod(own[text] for own, text in zip(laws, written, strict=True))
        for written in itertools.product(*laws)
    }
    assert_same_law(law(together), expected)


@pytest.mark.parametrize(("tree", "proposal"), [(RAGGED, "top_k"), (LONE, "sampled"), (LONE, "mixed")])
def test_rows_may_differ_in_processors_limit_and_temperature(tree: CandidateTree, proposal: Proposal) -> None:
    cases = [
        Case(tree, proposal, PROCESSORS["top-k"], new=2),
        Case(tree, proposal, PROCESSORS["no repeated bigram"], do_sample=False, language=Language(1)),
        Case(tree, proposal, PROCESSORS["min-p"], language=Language(2)),
    ]
    check_together(cases, [(*PROMPT, 3)] * 3)


@pytest.mark.parametrize(("tree", "proposal"), [(UNEVEN, "top_k"), (RAGGED, "sampled"), (UNEVEN, "mixed")])
def test_rows_may_stand_at_nodes_with_different_numbers_of_children(tree: CandidateTree, proposal: Proposal) -> None:
    """Their texts differ, and the processors that look at them are the same objects, as in any batch."""
    shared = [hf.RepetitionPenaltyLogitsProcessor(3.0), hf.TopKLogitsWarper(2)]
    cases = [Case(tree, proposal, lambda: shared, new=4, language=Language(seed, left_out=2)) for seed in (8, 6)]
    check_together(cases, [(*PROMPT, 3), (*PROMPT, 1)])


# Where a text ends


@pytest.mark.parametrize(
    ("limit", "written", "reason", "path"),
    [
        (9, (3, 2, EOS), "stop", [0, 1, 2]),
        (3, (3, 2, EOS), "stop", [0, 1, 2]),
        (2, (3, 2), "length", [0, 1]),
        (1, (3,), "length", [0]),
    ],
)
def test_nothing_is_written_behind_the_end(limit: int, written: Text, reason: str, path: list[int]) -> None:
    """The tree is right down to its last node, but the end token is on the way, or the limit."""
    layout = layout_of(CandidateTree.chain(4))
    candidates = Candidates(torch.tensor([[2, 3, 2, EOS, 1]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 2, EOS, 1, 1]]), V) * 5.0
    for do_sample in (False, True):
        row = replace(Case(new=limit, do_sample=do_sample).row(), keep_scores=True, keep_logits=True)
        draws = ScriptedDraws([3, 2, EOS][:limit]) if do_sample else CertainDraws()
        assert walk_exact([row], candidates, logits, layout, draws) == [path]
        assert text_of(row) == (*PROMPT, *written)
        assert row.finish_reason == reason
        assert row.new_tokens == len(row.scores) == len(row.logits) == len(written)
        assert [int(scores.argmax()) for scores in row.scores] == list(written)
    row = Case(new=limit, do_sample=False).row()
    walk_typical([row], candidates, logits, layout, Typical(), CertainDraws())
    assert (text_of(row), row.finish_reason) == ((*PROMPT, *written), reason)


# Typical acceptance


def typical_walk(typical: Typical) -> Walk:
    def walk(rows: list[Row], candidates: Candidates, logits: Tensor, layout: TreeLayout, draws: Draws) -> Any:
        return walk_typical(rows, candidates, logits, layout, typical, draws)

    return walk


def slow_typical(
    case: Case, text: Text, tokens: list[int], layout: TreeLayout, typical: Typical
) -> list[tuple[int, float, list[int]]]:
    """All paths of typical tokens, from the root on: how long, how likely, which nodes. The best one comes last."""
    found = [(0, 0.0, [0])]
    for node in range(1, layout.num_nodes):
        nodes = nodes_on_the_way(layout, node)
        path = [tokens[i] for i in nodes]
        total = 0.0
        for i, token in enumerate(path):
            p = distribution_after(case, (*text, *path[:i]))
            entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
            delta = math.sqrt(typical.epsilon) if typical.delta is None else typical.delta
            if p[token] <= min(typical.epsilon, delta * math.exp(-entropy)):
                break
            total += math.log(p[token])
        else:
            found.append((len(path), total, [0, *nodes]))
    return sorted(found)


@pytest.mark.parametrize(
    "typical", [Typical(), Typical(0.15), Typical(0.2, 0.1), Typical(0.12, greedy_root=True)], ids=str
)
@pytest.mark.parametrize("processors", [no_processors, PROCESSORS["penalty, then temperature and top-k"]])
def test_typical_takes_the_longest_typical_path_and_the_likeliest_of_equals(
    typical: Typical, processors: Processors
) -> None:
    """Then the next root: drawn from p after the last node, or the likeliest token."""
    ties = 0
    for seed in range(6):
        tree = random_tree(seed, nodes=9, depth=K, width=3)
        case = Case(tree, new=9, processors=processors, language=Language(seed), walk=typical_walk(typical))
        layout = layout_of(tree)
        for text in itertools.product(PROMPT, range(1, V), range(1, V)):
            tokens = case.language.candidates(text, layout, "top_k", CertainDraws()).tokens[0].tolist()
            paths = slow_typical(case, text, tokens, layout, typical)
            best = paths[-1][-1]
            expected = (*text, *(tokens[node] for node in best[1:]))
            if EOS in expected:
                continue
            ties += any(length == len(best) - 1 and nodes < best for length, _, nodes in paths)
            p = distribution_after(case, expected)
            bonus = {int(p.argmax()): 1.0} if typical.greedy_root else dict(enumerate(p.tolist()))

            def one_step(draws: Draws, case: Case = case, text: Text = text) -> tuple[tuple[int, ...], Text]:
                row = case.row(text)
                return tuple(case.step(row, draws)), text_of(row)

            assert_same_law(
                law(one_step),
                {(tuple(best), (*expected, token)): chance for token, chance in bonus.items() if chance > 0},
            )
    assert ties, "the likeliest of the longest paths was always the first one"


def test_typical_is_greedy_at_temperature_zero() -> None:
    for seed in range(5):
        case = Case(TREES["wide"], new=6, do_sample=False, language=Language(seed), walk=typical_walk(Typical()))
        assert written(case, CertainDraws()) == plainly_written(case, CertainDraws())


@pytest.mark.parametrize("typical", [Typical(), Typical(greedy_root=True)], ids=str)
def test_typical_is_not_exact(typical: Typical) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        check(Case(walk=typical_walk(typical)))


# With a model, against `generate`

NEW = 13


class Recorder(LogitsProcessor):
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[Text, list[float]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((tuple(input_ids[0].tolist()), scores[0].tolist()))
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_see_the_calls_of_generate(do_sample: bool) -> None:
    """And where siblings are fixed, dice of one seed fall alike: the text is that of `generate`, token for token."""
    model, prompt, theirs, ours = shared_model("llama"), prompt_of(5), Recorder(), Recorder()
    options: dict[str, Any] = {"do_sample": do_sample, "repetition_penalty": 1.3, "max_new_tokens": NEW}
    if do_sample:
        options |= {"temperature": 0.8, "top_p": 0.9}
    torch.manual_seed(0)
    text = model.generate(prompt, logits_processor=LogitsProcessorList([theirs]), **options)
    assert isinstance(text, Tensor)
    medusa = guide(tiny_medusa(model, num_heads=K), [text], lambda t, k: (t + k) % 3)
    decoder = MedusaDecoder(medusa, BRANCHING, proposal="top_k")
    torch.manual_seed(0)
    result = decoder.generate(prompt, logits_processor=LogitsProcessorList([ours]), **options)
    assert result.sequences.tolist() == text.tolist()
    assert result.stats.accepted.count(0) < len(result.stats.accepted), "no guess was accepted"
    assert [context for context, _ in ours.calls] == [context for context, _ in theirs.calls]
    for (_, seen), (_, expected) in zip(ours.calls, theirs.calls, strict=True):
        assert seen == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("proposal", ["sampled", "mixed"])
def test_processors_see_each_prefix_once_whatever_is_proposed(proposal: Proposal) -> None:
    model, recorder = shared_model("llama"), Recorder()
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), BRANCHING, proposal=proposal)
    processors = LogitsProcessorList([recorder])
    options: dict[str, Any] = {"do_sample": True, "temperature": 30.0, "logits_processor": processors, "seed": 0}
    result = decoder.generate(prompt_of(5), NEW, **options)
    text = tuple(result.sequences[0].tolist())
    assert sum(result.stats.accepted) > 0
    assert [context for context, _ in recorder.calls] == [text[:length] for length in range(5, 5 + NEW)]


def test_rows_may_have_processors_of_their_own() -> None:
    model = shared_model("llama")
    decoder = MedusaDecoder(tiny_medusa(model, num_heads=K), BRANCHING)
    prompts = torch.cat([prompt_of(6, seed) for seed in range(3)])
    own = ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1, "suppress_tokens": [5, 6]}, {"min_new_tokens": 4})
    configs = [GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0, **options) for options in own]
    result = decoder.generate(prompts, generation_config=configs)
    for row, (prompt, options) in enumerate(zip(prompts, own, strict=True)):
        assert result.sequences[row].tolist() == hf_greedy(model, prompt[None], NEW, **options)[0].tolist()


class Broken(LogitsProcessor):
    """Works until the text is so long, then gives `value` for every token."""

    def __init__(self, length: int, value: float) -> None:
        self.length, self.value = length, value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, self.value)


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "returned NaN"), (float("-inf"), "forbade every token")])
@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_that_leaves_nothing_is_named_and_the_decoder_goes_on(
    value: float, what: str, length: int, do_sample: bool
) -> None:
    """At the first token and inside a block; other rows were fine."""
    model = shared_model("llama")
    text = hf_greedy(model, prompt_of(5), NEW + K)
    decoder = MedusaDecoder(guide(tiny_medusa(model, num_heads=K), [text]), CandidateTree.chain(K))
    processors = LogitsProcessorList([Broken(length, value)])
    options: dict[str, Any] = {"do_sample": do_sample}
    if do_sample:
        options |= {"top_k": 1}  # the heads know one text only
    with pytest.raises(ValueError, match=rf"after {length} tokens the logits processors \(.*Broken.*\) {what}"):
        decoder.generate(prompt_of(5).repeat(2, 1), NEW, logits_processor=processors, **options)
    assert decoder.generate(prompt_of(5), NEW).sequences.tolist() == text[:, :-K].tolist()
