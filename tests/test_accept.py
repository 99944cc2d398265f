"""The rules at one node: over all outcomes, the token that follows is distributed as the backbone's p, to 1e-10.

V vocabulary, R nodes, C children. Each check takes the rule it judges, and has to refuse rules that are nearly right.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from enumeration import assert_same_law, law, likeliest, mixed_siblings, siblings
from torch import Tensor

from medusa.inference.accept import NO_TOKEN, Typical, accept_fixed, accept_mixed, accept_sampled
from medusa.inference.draws import CertainDraws, Draws, RandomDraws

V = 4
FixedRule = Callable[[Tensor, Tensor, Draws], tuple[Tensor, Tensor]]
SampledRule = Callable[[Tensor, Tensor, Tensor, Draws], tuple[Tensor, Tensor]]
MixedRule = Callable[[Tensor, Tensor, Tensor, Tensor, Draws], tuple[Tensor, Tensor]]


def distribution(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


GENERIC = (distribution(6, 3, 4, 7), distribution(3, 4, 6, 1))  # every mistake below shows in it
PAIRS: dict[str, tuple[Tensor, Tensor]] = {
    "generic": GENERIC,
    "far apart": (distribution(1, 1, 30, 90), distribution(90, 30, 1, 1)),
    "p = q": (GENERIC[0], GENERIC[0]),
    "uniform q": (GENERIC[0], distribution(1, 1, 1, 1)),
    "zeros in p": (distribution(0, 2, 0, 1), GENERIC[1]),
    "zeros in q": (GENERIC[0], distribution(2, 0, 0, 1)),
    "zeros in both": (distribution(0, 1, 3, 2), distribution(3, 1, 0, 2)),
    "disjoint": (distribution(0, 1, 0, 2), distribution(3, 0, 1, 0)),
    "point mass p": (distribution(0, 0, 1, 0), GENERIC[1]),
    "point mass p outside q": (distribution(0, 0, 1, 0), distribution(1, 2, 0, 1)),
    "point mass q": (GENERIC[0], distribution(0, 1, 0, 0)),
    "two point masses": (distribution(0, 0, 0, 1), distribution(0, 0, 0, 1)),
}
pairs = pytest.mark.parametrize(("p", "q"), PAIRS.values(), ids=PAIRS)
counts = pytest.mark.parametrize("count", range(5))


def law_of(p: Tensor) -> dict[int, float]:
    return dict(enumerate(p.tolist()))


def decided(token: Tensor, child: Tensor, children: Sequence[int]) -> tuple[int, bool]:
    """The token that a rule chose, and whether a child carries it, which then must be so."""
    if child != NO_TOKEN:
        assert children[int(child)] == token, "the accepted child carries another token"
    return int(token), bool(child != NO_TOKEN)


def check(run: Callable[[Draws], tuple[int, bool]], p: Tensor) -> float:
    """Assert that the token is distributed as p; returns how likely a child was accepted."""
    found = law(run)
    tokens: dict[int, float] = {}
    for (token, _), probability in found.items():
        tokens[token] = tokens.get(token, 0.0) + probability
    assert_same_law(tokens, law_of(p))
    return sum(probability for (_, accepted), probability in found.items() if accepted)


def check_fixed(rule: FixedRule, p: Tensor, children: Sequence[int]) -> float:
    given = torch.tensor([children], dtype=torch.long)
    return check(lambda draws: decided(*rule(p[None], given, draws), children), p)


def check_sampled(rule: SampledRule, p: Tensor, q: Tensor, count: int, replacement: bool = False) -> float:
    def run(draws: Draws) -> tuple[int, bool]:
        children = siblings(q, count, draws, replacement)
        given = torch.tensor([children], dtype=torch.long)
        return decided(*rule(p[None], q[None], given, draws), children)

    return check(run, p)


def check_mixed(rule: MixedRule, p: Tensor, q: Tensor, count: int) -> float:
    def run(draws: Draws) -> tuple[int, bool]:
        children = mixed_siblings(q, count, draws)
        given = torch.tensor([children])
        return decided(*rule(p[None], q[None], given[:, :-1], given[:, -1], draws), children)

    return check(run, p)


@pytest.mark.parametrize("p", [p for p, _ in PAIRS.values()], ids=PAIRS)
def test_fixed_children_leave_p_as_it_is(p: Tensor) -> None:
    """Whatever they are: any number, in any order, some twice, empty places behind."""
    for count in range(5):
        for children in itertools.permutations(range(V), count):
            accepted = check_fixed(accept_fixed, p, children)
            assert accepted == pytest.approx(float(p[list(children)].sum()), abs=1e-12), "no exact rule does better"
    for children in ([2, 2], [1, 3, 1, 3], [3, NO_TOKEN], [NO_TOKEN, NO_TOKEN], [0, 1, NO_TOKEN, NO_TOKEN]):
        check_fixed(accept_fixed, p, children)


@counts
@pairs
def test_children_drawn_without_replacement_leave_p_as_it_is(p: Tensor, q: Tensor, count: int) -> None:
    accepted = check_sampled(accept_sampled, p, q, count)
    if count == 1:
        assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    if count == V:
        assert accepted == pytest.approx(float(p[q > 0].sum()), abs=1e-12), "all that q can propose was proposed"


@pytest.mark.parametrize("count", range(4))
@pairs
def test_children_drawn_with_replacement_leave_p_as_it_is(p: Tensor, q: Tensor, count: int) -> None:
    accepted = check_sampled(partial(accept_sampled, replacement=True), p, q, count, replacement=True)
    if count == 1:
        assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("count", range(1, 5))
@pairs
def test_fixed_children_and_a_drawn_one_leave_p_as_it_is(p: Tensor, q: Tensor, count: int) -> None:
    accepted = check_mixed(accept_mixed, p, q, count)
    fixed = [token for token in likeliest(q, count - 1) if token != NO_TOKEN]
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(fixed, dtype=torch.long), False)
    rest = q * outside / (q * outside).sum().clamp(min=1e-300)
    best = float(p[~outside].sum() + torch.minimum(p, rest)[outside].sum())
    assert accepted == pytest.approx(best, abs=1e-12)


def test_more_drawn_children_are_accepted_more_often() -> None:
    p, q = GENERIC
    rates = [check_sampled(accept_sampled, p, q, count) for count in range(5)]
    assert rates == sorted(set(rates))
    assert rates[0] == 0
    assert rates[4] == pytest.approx(1)


@pytest.mark.parametrize("name", ["point mass p", "point mass p outside q", "two point masses"])
def test_temperature_zero_is_greedy_without_dice(name: str) -> None:
    """Whatever the children, the likeliest token follows, and a child that carries it is accepted."""
    p, q = PAIRS[name]
    best = int(p.argmax())
    for children in itertools.permutations(range(V), 2):
        given, here, there = torch.tensor([children]), p[None], q[None]
        expected = (best, children.index(best) if best in children else NO_TOKEN)
        assert tuple(map(int, accept_fixed(here, given, CertainDraws()))) == expected
        assert tuple(map(int, accept_mixed(here, there, given[:, :1], given[:, 1], CertainDraws()))) == expected
        assert tuple(map(int, accept_sampled(here, there, given, CertainDraws()))) == expected


# Several nodes at once


def test_nodes_decided_together_do_not_touch_each_other() -> None:
    """Nodes with two, one and no children, the longest last: tokens are independent, each distributed as its own p."""
    ps = torch.stack([distribution(1, 2, 3), distribution(4, 1, 1), distribution(2, 0, 3)])
    qs = torch.stack([distribution(3, 1, 1), distribution(1, 1, 1), distribution(1, 4, 2)])
    expected = {
        tokens: float(torch.stack([p[token] for p, token in zip(ps, tokens, strict=True)]).prod())
        for tokens in itertools.product(range(3), repeat=3)
    }
    given = torch.tensor([[1, NO_TOKEN], [NO_TOKEN, NO_TOKEN], [0, 2]])

    def fixed(draws: Draws) -> tuple[int, ...]:
        return tuple(accept_fixed(ps, given, draws)[0].tolist())

    def sampled(draws: Draws) -> tuple[int, ...]:
        first, last = siblings(qs[0], 1, draws), siblings(qs[2], 2, draws)
        children = torch.tensor([[*first, NO_TOKEN], [NO_TOKEN, NO_TOKEN], last])
        token, child = accept_sampled(ps, qs, children, draws)
        assert child[1] == NO_TOKEN
        assert child[0] < 1
        return tuple(token.tolist())

    def mixed(draws: Draws) -> tuple[int, ...]:
        (first,), (likely, last) = mixed_siblings(qs[0], 1, draws), mixed_siblings(qs[2], 2, draws)
        likely_ones = torch.tensor([[NO_TOKEN], [NO_TOKEN], [likely]])
        token, child = accept_mixed(ps, qs, likely_ones, torch.tensor([first, NO_TOKEN, last]), draws)
        assert child[1] == NO_TOKEN
        return tuple(token.tolist())

    for run in (fixed, sampled, mixed):
        assert_same_law(law(run), expected)


# Rules that are nearly right


def of_nodes(rule: Callable[[Tensor, Tensor, list[int], Draws], tuple[int, int]]) -> SampledRule:
    """A rule for one node, written as a loop, in the shape of the others."""

    def batched(p: Tensor, q: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        token, child = rule(p[0], q[0], children[0].tolist(), draws)
        return torch.tensor([token]), torch.tensor([child])

    return batched


def plainly_sampled(
    p: Tensor,
    q: Tensor,
    children: list[int],
    draws: Draws,
    forget_rejections: bool = False,
    redraw_from_p: bool = False,
    keep_rejected_in_q: bool = False,
) -> tuple[int, int]:
    """`accept_sampled` once more, as the papers write it, with places where one can go wrong."""
    left = p
    for i, x in enumerate(children):
        if x == NO_TOKEN:
            break
        if draws.bernoulli((left[x] / q[x]).clamp(max=1)[None]):
            return x, i
        if not forget_rejections:
            left = (left - q).clamp(min=0)
            left = left / left.sum()
        if not keep_rejected_in_q:
            q = q.index_fill(0, torch.tensor(x), 0.0)
            q = q / q.sum().clamp(min=1e-300)
    return int(draws.categorical((p if redraw_from_p else left)[None])), NO_TOKEN


def sorted_by_q(p: Tensor, q: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    order = q.gather(1, children).argsort(dim=1, descending=True)
    token, child = accept_sampled(p, q, children.gather(1, order), draws)
    return token, torch.where(child == NO_TOKEN, child, order.gather(1, child.clamp(min=0)[:, None])[:, 0])


WRONG_SAMPLED: dict[str, SampledRule] = {
    "sorted by q before testing": sorted_by_q,
    "x stays in q": partial(accept_sampled, replacement=True),
    "x stays in q, as a loop": of_nodes(partial(plainly_sampled, keep_rejected_in_q=True)),
    "tests against the original p": of_nodes(partial(plainly_sampled, forget_rejections=True)),
    "redrawn from p": of_nodes(partial(plainly_sampled, redraw_from_p=True)),
}


def test_the_rule_as_the_papers_write_it_passes() -> None:
    """So it is the planted mistakes that fail below, not the loop around them."""
    for count in range(4):
        check_sampled(of_nodes(plainly_sampled), *GENERIC, count)


@pytest.mark.parametrize("name", WRONG_SAMPLED)
def test_wrong_rules_for_drawn_children_fail(name: str) -> None:
    check_sampled(WRONG_SAMPLED[name], GENERIC[0], GENERIC[0], 1)  # where p = q nothing can go wrong
    with pytest.raises(AssertionError, match="instead of"):
        check_sampled(WRONG_SAMPLED[name], *GENERIC, 2)


def test_removing_from_q_is_wrong_with_replacement() -> None:
    check_sampled(accept_sampled, *GENERIC, 1, replacement=True)
    with pytest.raises(AssertionError, match="instead of"):
        check_sampled(accept_sampled, *GENERIC, 2, replacement=True)


def test_the_rule_for_drawn_children_is_wrong_for_the_likeliest_ones() -> None:
    """min(1, p/q) for top-k siblings emits them too often."""
    p, q = GENERIC

    def rule(p: Tensor, children: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return accept_sampled(p, q[None], children, draws)

    for count in (1, 2, 3):
        with pytest.raises(AssertionError, match="instead of"):
            check_fixed(rule, p, likeliest(q, count))


def fixed_first(p: Tensor, q: Tensor, fixed: Tensor, sampled: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw from p for the fixed children, and only then test the drawn one."""
    token, child = accept_fixed(p, fixed, draws)
    if child[0] != NO_TOKEN:
        return token, child
    token, last = accept_sampled(p, distribution(*q[0].index_fill(0, fixed[0], 0.0))[None], sampled[:, None], draws)
    return token, torch.where(last == 0, fixed.shape[1], last)


def q_with_the_fixed(p: Tensor, q: Tensor, fixed: Tensor, sampled: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Test the drawn child against all of q."""
    token, child = accept_sampled(p, q, sampled[:, None], draws)
    return token, torch.where(child == 0, fixed.shape[1], child)


@pytest.mark.parametrize("rule", [fixed_first, q_with_the_fixed])
def test_wrong_rules_for_mixed_children_fail(rule: MixedRule) -> None:
    for count in (2, 3):
        with pytest.raises(AssertionError, match="instead of"):
            check_mixed(rule, *GENERIC, count)


# The dice


def test_random_dice_fall_as_often_as_they_should() -> None:
    draws, p = RandomDraws(torch.Generator().manual_seed(0)), distribution(0, 1, 2, 5)
    tokens = draws.categorical(p.expand(40_000, -1)).bincount(minlength=V) / 40_000
    assert tokens.tolist() == pytest.approx(p.tolist(), abs=0.01)
    assert tokens[0] == 0
    assert float(draws.bernoulli(torch.full((40_000,), 0.3)).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert draws.bernoulli(torch.ones(40_000)).all()
    assert not draws.bernoulli(torch.zeros(40_000)).any()


# Typical acceptance


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, None), (0.3, None), (0.3, 0.2), (0.25, 5.0)])
@pytest.mark.parametrize("p", [p for p, _ in PAIRS.values()], ids=PAIRS)
def test_typical_tokens_are_above_the_threshold(p: Tensor, epsilon: float, delta: float | None) -> None:
    """min(epsilon, delta * exp(-H)), with delta = sqrt(epsilon) unless given."""
    entropy = -sum(x * torch.tensor(x).log().item() for x in p.tolist() if x > 0)
    factor = epsilon**0.5 if delta is None else delta
    threshold = min(epsilon, factor * torch.tensor(-entropy).exp().item())
    stays = Typical(epsilon, delta).accepts(p[None], torch.tensor([[*range(V), NO_TOKEN]]))
    assert stays.tolist() == [[*(x > threshold for x in p.tolist()), False]]


def test_the_entropy_decides_where_it_makes_the_threshold_lower() -> None:
    """Of four equally likely tokens each has 0.25: below epsilon, but above delta * exp(-H) = delta / 4."""
    uniform, tokens = distribution(1, 1, 1, 1)[None], torch.tensor([[0]])
    assert Typical(0.3).accepts(uniform, tokens).all()
    assert not Typical(0.3, delta=1.1).accepts(uniform, tokens).any()


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"delta": -1.0}])
def test_typical_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*such as 0.09|delta is .*sqrt"):
        Typical(**options)
