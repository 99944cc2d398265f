"""Heads inside vLLM: which rows are whose, without vLLM; the engine itself where its environment exists."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import shared_model, tiny_medusa
from torch import Tensor, nn

from medusa.heads import MedusaHeads
from medusa.inference import vllm_proposer
from medusa.inference.chain import Chain
from medusa.inference.vllm_proposer import DraftLedger, MedusaProposer

ROOT = Path(__file__).parent.parent
DEPTH = 2


def text(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def test_rows_of_mixed_steps() -> None:
    """Drafts that were checked, a prompt just read, a part of a prompt; in the next step the batch is reordered."""
    ledger = DraftLedger()
    assert ledger.last_rows([[5], [6]], [text(1, 5), text(2, 2, 6)], rows=2) == [0, 1]
    ledger.record([text(1, 5), text(2, 2, 6)], [[7, 8], [9]])
    # The second request took the first place; its draft of 1 was accepted, of the other's 2 none; a part of a prompt.
    texts = [text(2, 2, 6, 9, 4), text(3, 3, 3), text(1, 5, 0), text(4, 4, 1)]
    assert ledger.last_rows([[9, 4], [], [0], [1]], texts, rows=2 + 1 + 3 + 1)[::2] == [1, 3]
    assert ledger.last_rows([[9, 4], [], [0], [1]], texts, rows=7)[3] == 6


def test_a_cut_draft_hides_all_rows_for_one_step() -> None:
    ledger = DraftLedger()
    ledger.record([text(1, 5), text(2, 6)], [[7, 8], [9, 9]])
    texts = [text(1, 5, 0), text(2, 6, 0)]
    assert ledger.last_rows([[0], [0]], texts, rows=6) == [0, 3]
    assert ledger.last_rows([[0], [0]], texts, rows=5) == []
    ledger.record(texts, [[], []])
    assert ledger.last_rows([[1], [1]], [text(1, 5, 0, 1), text(2, 6, 0, 1)], rows=2) == [0, 1]


def test_a_request_that_missed_a_step_had_nothing_checked() -> None:
    """As after preemption: its prompt and its answer so far are read anew."""
    ledger = DraftLedger()
    ledger.record([text(1, 5), text(2, 6)], [[7, 8], [9, 9]])
    ledger.record([text(2, 6, 3)], [[9, 9]])
    assert ledger.last_rows([[4], [0]], [text(1, 5, 4), text(2, 6, 3, 0)], rows=1 + 3) == [0, 1]


def test_more_tokens_than_rows_are_not_explained() -> None:
    assert DraftLedger().last_rows([[1, 2]], [text(9, 1, 2)], rows=1) == []


class Target(nn.Module):
    """As much of a served model as the proposer touches."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def config(directory: object = "heads", depth: int = DEPTH, parallel: int = 1) -> Any:
    return SimpleNamespace(
        additional_config={} if directory is None else {"medusa_heads": str(directory)},
        parallel_config=SimpleNamespace(tensor_parallel_size=parallel, pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=depth),
    )


def loaded(heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch, depth: int = DEPTH) -> tuple[MedusaProposer, Any]:
    monkeypatch.setattr(vllm_proposer, "load_heads", lambda directory, target: heads)
    proposer, target = MedusaProposer(config(depth=depth)), Target()
    proposer.load_model(target)
    return proposer, target


@pytest.mark.parametrize("kind", [{}, {"root_conditioned": True}, {"sequential": True, "projection": "shared"}])
def test_drafts_come_from_the_row_of_the_last_token(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heads = tiny_medusa(shared_model("llama", torch.float32), num_heads=3, **kind).heads
    proposer, target = loaded(heads, monkeypatch)
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    expected = Chain(heads, DEPTH, states.device).guesses(states, torch.tensor([5, 6, 0, 7, 8, 9])).tolist()
    texts = np.zeros((3, 20), dtype=np.int32)

    texts[0, :2], texts[1, :3], texts[2, :4] = (1, 5), (2, 2, 6), (3, 3, 3, 3)
    target.compute_logits(states[:3])
    drafts = proposer.propose([[5], [6], []], np.array([2, 3, 4]), texts, slot_mappings=None)
    assert drafts == [expected[0], expected[1], []]

    # Next: three rows for the first request, of which the first counts; the second is done; the prompt goes on.
    texts[0, 2] = 0
    texts[1, :5], texts[2, :] = (3, 3, 3, 3, 8), 0
    target.compute_logits(torch.stack([states[2], states[0], states[0], states[4]]))
    assert proposer.propose([[0], [8]], np.array([3, 5]), texts) == [expected[2], expected[4]]

    # Rows that are not explained: no drafts, rather than wrong ones.
    texts[0, 3] = 5
    target.compute_logits(states[:5])
    assert proposer.propose([[5], []], np.array([4, 5]), texts) == [[], []]


def test_more_tokens_than_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = tiny_medusa(shared_model("llama", torch.float32), num_heads=2).heads
    with pytest.raises(ValueError, match="3 levels deep but the model has 2 heads"):
        loaded(heads, monkeypatch, depth=3)


def test_settings_that_do_not_do() -> None:
    with pytest.raises(ValueError, match=r"--additional-config '\{\"medusa_heads\": \"DIR\"\}'"):
        MedusaProposer(config(None))
    with pytest.raises(ValueError, match="tensor_parallel_size is 2"):
        MedusaProposer(config(parallel=2))


@pytest.mark.vllm
def test_vllm_accepts_what_we_accept() -> None:
    if not (ROOT / ".venv-vllm" / "complete").exists():
        pytest.skip("bash scripts/vllm_check.sh has not made vLLM's environment")
    done = subprocess.run(["bash", "scripts/vllm_check.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["differences"] == 0
