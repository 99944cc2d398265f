from itertools import combinations

import pytest
import torch
from tiny import CONFIGS, VOCAB, hf_greedy, prompt_of, shared_model

from medusa.backbone import Backbone
from medusa.train.answer import answer, likeliest

NEW = 20
LENGTHS = (9, 3, 14, 9, 1, 6, 3, 11)
"""Some equal, some beyond the tiny models' sliding window of 8, longest neither first nor last."""


def ignore(count: int) -> None:
    """Progress that nobody watches."""


def most_varied_ends(answers: list[list[int]]) -> set[int]:
    """The two tokens that cut these answers to the most different lengths."""

    def lengths(ends: tuple[int, ...]) -> int:
        cut = [[token in ends for token in tokens] for tokens in answers]
        return len({found.index(True) if True in found else NEW for found in cut})

    return set(max(combinations(range(VOCAB), 2), key=lengths))


@pytest.mark.parametrize("beginning", [0, 10])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_answer_is_what_generate_gives_alone(name: str, beginning: int) -> None:
    """Rows end at different steps, first and last ones too, and the others go on unharmed."""
    backbone = Backbone(shared_model(name))
    common = prompt_of(beginning)
    prompts = [torch.cat([common, prompt_of(n, seed)], 1) for seed, n in enumerate(LENGTHS)]
    prompts[2] = prompts[2][:, beginning // 2 :] if beginning else prompts[2]  # begins unlike the others
    free = [hf_greedy(backbone.model, p, NEW)[0, p.shape[1] :].tolist() for p in prompts]
    ends = most_varied_ends(free)
    texts = [hf_greedy(backbone.model, p, NEW, eos_token_id=sorted(ends))[0] for p in prompts]
    expected = [text[p.shape[1] :].tolist() for text, p in zip(texts, prompts, strict=True)]
    assert len({len(tokens) for tokens in expected}) >= 3, "the answers do not end at different steps"

    ended: list[int] = []
    answers, states = answer(backbone, [p[0].tolist() for p in prompts], NEW, ends, ended.append)

    assert answers == expected
    assert sum(ended) == len(prompts)
    for text, prompt, hidden in zip(texts, prompts, states, strict=True):
        with torch.no_grad():
            whole = backbone.hidden(text[None])[0, prompt.shape[1] - 1 : -1]
        torch.testing.assert_close(hidden, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "phi"])  # phi's LM head has a bias
def test_slices_of_the_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(shared_model(name))
    hidden = torch.randn(7, backbone.hidden_size, dtype=backbone.lm_weight.dtype)
    whole = backbone.logits(hidden).argmax(dim=-1)
    for entries in (1, 7 * 10, 7 * VOCAB - 1, 7 * VOCAB):
        monkeypatch.setattr("medusa.train.answer.LOGITS", entries)
        assert torch.equal(likeliest(backbone, hidden), whole)


def test_every_answer_may_end_at_once() -> None:
    backbone = Backbone(shared_model("llama"))
    prompts = [prompt_of(length, seed)[0].tolist() for seed, length in enumerate(LENGTHS)]
    free, _ = answer(backbone, prompts, 1, set(), ignore)
    again, states = answer(backbone, prompts, NEW, {tokens[0] for tokens in free}, ignore)
    assert again == free
    assert [len(hidden) for hidden in states] == [1] * len(prompts)


def test_no_answer_reaches_beyond_the_context() -> None:
    """GPT-2 has a learned table of 256 positions and would fail at the next one."""
    backbone = Backbone(shared_model("gpt2"))
    prompts = [prompt_of(length)[0].tolist() for length in (250, 40)]
    answers, _ = answer(backbone, prompts, NEW, set(), ignore)
    assert [len(tokens) for tokens in answers] == [6, NEW]
