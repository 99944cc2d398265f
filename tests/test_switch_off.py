"""Decoding plainly where the tree does not pay: when, and that the text stays the same. No clock: costs are given."""

import warnings

import pytest
import torch
from tiny import hf_greedy, prompt_of, shared_model, tiny_medusa

from medusa import CandidateTree
from medusa.inference import MedusaDecoder
from medusa.inference.head_proposer import HeadProposer
from medusa.inference.switch_off import ENOUGH, PLAIN_STEPS, StepCosts, Switch, SwitchOff


def decoder_with(cost: float) -> MedusaDecoder:
    medusa = tiny_medusa(shared_model("llama"), num_heads=2)
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0)])
    heads = HeadProposer(medusa.heads, tree, medusa.backbone.vocab_size, torch.device("cpu"))
    return MedusaDecoder(medusa, proposer=SwitchOff(heads, StepCosts({(1, 128): cost})))


def test_costs_are_the_nearest_by_ratio() -> None:
    costs = StepCosts({(1, 64): 1.1, (1, 1024): 1.2, (8, 64): 2.0})
    assert costs.at(1, 100) == 1.1
    assert costs.at(2, 900) == 1.2
    assert costs.at(32, 64) == 2.0


def test_tree_is_left_out_and_tried_again() -> None:
    switch = Switch(StepCosts({(1, 64): 1.5}))
    for _ in range(2):
        for _ in range(ENOUGH):
            assert switch.pays(1, 64)
            switch.count([1])
        assert not any(switch.pays(1, 64) for _ in range(PLAIN_STEPS))
    assert switch.pays(1, 64)


def test_batch_and_context_decide_too() -> None:
    switch = Switch(StepCosts({(1, 64): 1.5, (8, 64): 2.5, (1, 4096): 3.0}))
    for _ in range(ENOUGH):
        switch.count([2, 2])
    assert switch.pays(1, 64)
    assert not switch.pays(8, 64)
    switch = Switch(switch.costs)
    for _ in range(ENOUGH):
        switch.count([2])
    assert not switch.pays(1, 4096)


@pytest.mark.parametrize("cost", [0.01, 100.0], ids=["on", "off"])
@pytest.mark.parametrize("rows", [1, 3])
def test_text_stays_what_generate_says(cost: float, rows: int) -> None:
    prompt, decoder = prompt_of(5), decoder_with(cost)
    expected = hf_greedy(shared_model("llama"), prompt, 40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [decoder.generate(prompt.repeat(rows, 1), 40).sequences for _ in range(2)]
    for sequences in found:
        assert sequences.tolist() == expected.repeat(rows, 1).tolist()
    assert sum("do not pay" in str(warning.message) for warning in caught) == (cost > 1)


@pytest.mark.parametrize("ratios", [{}, {(0, 64): 1.0}, {(1, 64): 0.0}, {(1, 64): float("nan")}])
def test_bad_costs_are_named(ratios: dict[tuple[int, int], float]) -> None:
    with pytest.raises(ValueError, match="step cost"):
        StepCosts(ratios)
