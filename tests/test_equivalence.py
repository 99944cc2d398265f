"""What rounding explains, and what it does not."""

from dataclasses import replace

import pytest
import torch
from tiny import CONFIGS, hf_greedy, prompt_of, shared_model, tiny_medusa, tiny_model
from torch import Tensor

from medusa.backbone import Backbone
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import Comparison, compare
from medusa.inference.equivalence import SLACK, Choice, choices, explain
from medusa.inference.walk import Path

PLACES = 12
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def with_twins(dtype: torch.dtype, prompt: Tensor, gap: float) -> tuple[Backbone, list[int], int]:
    """A model that chooses a token at every place from two that are `gap` apart in relative size.

    Returns the model, its answer, and the token that comes second at the first place.
    """
    model = tiny_model("llama", dtype)
    first = int(hf_greedy(model, prompt, 1)[0, -1])
    twin = (first + 1) % len(model.get_output_embeddings().weight)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[first] * (1 - gap)
    return Backbone(model), hf_greedy(model, prompt, PLACES)[0, prompt.shape[1] :].tolist(), twin


@pytest.mark.parametrize(
    ("dtype", "gap", "explained"),
    [
        (torch.bfloat16, 2**-8, True),
        (torch.bfloat16, 0.25, False),
        (torch.float32, 2**-23, True),
        (torch.float32, 2**-8, False),
        (torch.float64, 2**-24, True),  # scores are compared in fp32
        (torch.float64, 2**-8, False),
    ],
)
def test_a_tie_is_explained_in_the_precision_that_it_is_one_in(dtype: torch.dtype, gap: float, explained: bool) -> None:
    prompt = prompt_of(9)
    backbone, plain, twin = with_twins(dtype, prompt, gap)
    assert plain[0] != twin
    # What a decoder says that takes the twin first, and then decodes as it should.
    start = torch.cat([prompt, torch.tensor([[twin]])], dim=1)
    medusa = [twin, *hf_greedy(backbone.model, start, PLACES - 1)[0, start.shape[1] :].tolist()]
    found = explain(backbone, prompt, plain, medusa)
    assert found is not None
    assert (found.place, found.plain_token, found.medusa_token) == (0, plain[0], twin)
    assert found.choice is not None
    assert (found.choice.rank > 1) == (found.choice.margin > 0)
    assert found.explained is explained
    assert found.unexplained == (None if explained else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_answer_needs_no_explanation(name: str) -> None:
    backbone = Backbone(shared_model(name))
    prompt = prompt_of(9)
    plain = hf_greedy(backbone.model, prompt, 5)[0, 9:].tolist()
    assert explain(backbone, prompt, plain, plain) is None
    assert all(choice.margin == 0 and choice.rank == 1 for choice in choices(backbone, prompt, plain))


def test_an_error_behind_a_tie_is_found() -> None:
    prompt = prompt_of(9)
    backbone, plain, twin = with_twins(torch.float32, prompt, 2**-23)
    start = torch.cat([prompt, torch.tensor([[twin]])], dim=1)
    medusa = [twin, *hf_greedy(backbone.model, start, PLACES - 1)[0, start.shape[1] :].tolist()]
    medusa[7] = (medusa[7] + 40) % 97
    found = explain(backbone, prompt, plain, medusa)
    assert found is not None
    assert found.place == 0
    assert found.choice is not None
    assert found.choice.explained
    assert found.unexplained == 7


@pytest.mark.parametrize("length", [3, 5])
def test_an_answer_that_just_ends_is_not_explained(length: int) -> None:
    backbone = Backbone(shared_model("llama"))
    prompt = prompt_of(9)
    plain = hf_greedy(backbone.model, prompt, 4)[0, 9:].tolist()
    medusa = [*plain, 5][:length]
    found = explain(backbone, prompt, plain, medusa)
    assert found is not None
    assert found.choice is None
    assert found.unexplained == found.place == min(length, 4)


def test_processors_of_the_generation_config_take_part() -> None:
    """With a repetition penalty the best score is not the backbone's largest logit."""
    model = tiny_model("llama")
    assert model.generation_config is not None
    model.generation_config.repetition_penalty = 3.0
    prompt = prompt_of(9)
    plain = hf_greedy(model, prompt, PLACES)[0, 9:].tolist()
    assert all(choice.margin == 0 for choice in choices(Backbone(model), prompt, plain))


def test_rounding_is_measured_and_has_a_floor() -> None:
    assert Choice(margin=SLACK * 0.1, rounding=0.1, rank=2).explained
    assert not Choice(margin=SLACK * 0.1 + 1e-6, rounding=0.1, rank=2).explained
    prompt = prompt_of(9)
    roundings = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        backbone = Backbone(shared_model("llama", dtype))
        answer = hf_greedy(backbone.model, prompt, 6)[0, 9:].tolist()
        roundings[dtype] = [choice.rounding for choice in choices(backbone, prompt, answer)]
    assert 1e-3 < min(roundings[torch.bfloat16]) <= max(roundings[torch.bfloat16]) < 2
    assert 1e-8 < min(roundings[torch.float64]) <= max(roundings[torch.float32]) < 1e-3


def one_run(decoder: MedusaDecoder, prompt: Tensor) -> Comparison:
    (run,) = compare(decoder, [prompt], 24, lambda _: None).comparisons
    return run


def test_a_wrong_tree_mask_is_not_explained() -> None:
    medusa, prompt = tiny_medusa(shared_model("llama", torch.float32)), prompt_of(9, 1)
    decoder = MedusaDecoder(medusa, tree=TREE)
    assert one_run(decoder, prompt).identical
    layout = decoder.proposer.layout
    decoder.proposer.layout = replace(layout, ancestors=torch.ones_like(layout.ancestors))
    run = one_run(decoder, prompt)
    found = explain(medusa.backbone, run.prompt, run.plain, run.medusa)
    assert found is not None
    assert not found.explained


def test_a_wrong_acceptance_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa, prompt = tiny_medusa(shared_model("llama", torch.float32)), prompt_of(9, 2)
    decoder = MedusaDecoder(medusa, tree=TREE)
    accept = decoder.accept

    def wrong(state, candidates, logits, layout) -> list[Path]:  # type: ignore[no-untyped-def]
        """Choose the second best where the text has 20 tokens."""
        if state.rows[0].length == 20:
            best = logits.argmax(dim=-1, keepdim=True)
            logits = logits.scatter(-1, best, -torch.inf)
        return accept(state, candidates, logits, layout)

    monkeypatch.setattr(decoder, "accept", wrong)
    run = one_run(decoder, prompt)
    found = explain(medusa.backbone, run.prompt, run.plain, run.medusa)
    assert found is not None
    assert not found.explained
    assert found.choice is not None
    assert found.choice.rank >= 2
