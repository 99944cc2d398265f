import pytest
import torch
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.heads import LogitTransform, MedusaHeads
from medusa.train import loss as loss_module
from medusa.train.loss import HeadLoss
from medusa.train.supervision import IGNORE

D, V, P, K = 8, 17, 6, 3


def random_heads(config: MedusaConfig, transform: LogitTransform) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(config, torch.randn(V, D), torch.randn(V), torch.randn(V, D), transform)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5, softcap=3.0)])
@pytest.mark.parametrize("draft", [None, (0, 2, 3, 9, 16)])
@pytest.mark.parametrize("sees", ["root_conditioned", "sequential"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_value_and_gradient_against_the_formula(
    monkeypatch: pytest.MonkeyPatch,
    projection: str,
    sees: str,
    draft: tuple[int, ...] | None,
    transform: LogitTransform,
    chunked: bool,
) -> None:
    """Report R11: every head is trained, and as the formula says, position by position."""
    if chunked:
        monkeypatch.setattr(loss_module, "CHUNK_ENTRIES", 1)
    config = MedusaConfig(num_heads=K, projection=projection, draft_vocab=draft, **{sees: True})
    heads = random_heads(config, transform)
    hidden, root = torch.randn(P, D), torch.randint(0, V, (P,))
    targets = torch.randint(0, V, (P, K))
    targets[0] = torch.tensor([0, 2, 9])  # each in the draft vocabulary
    targets[1, 1:] = targets[4] = IGNORE

    total, per_head = HeadLoss(heads, head_decay=0.8)(hidden, root, targets)
    gradients = torch.autograd.grad(total, list(heads.parameters()))

    expected = torch.zeros(())
    logits = heads(hidden, root, targets[:, :-1].clamp(min=0))
    for k in range(K):
        own = torch.zeros(())
        for p in range(P):
            target = int(targets[p, k])
            if target == IGNORE or (draft is not None and target not in draft):
                continue
            index = target if draft is None else draft.index(target)
            own = own - F.log_softmax(logits[k, p], dim=-1)[index]
        torch.testing.assert_close(per_head[k], own, rtol=1e-5, atol=1e-5)
        expected = expected + 0.8**k * own
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, list(heads.parameters())), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)
        assert gradient.abs().sum() > 0


def test_rows_without_answers_add_nothing() -> None:
    """Report R4: no NaN, and the mean over what there is."""
    heads = random_heads(MedusaConfig(num_heads=K, projection="shared"), LogitTransform())
    total, per_head = HeadLoss(heads, 0.8)(
        torch.randn(P, D), torch.zeros(P, dtype=torch.long), torch.full((P, K), IGNORE)
    )
    total.backward()
    assert total == 0
    assert not per_head.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in heads.parameters())
    empty, _ = HeadLoss(heads, 0.8)(
        torch.zeros(0, D), torch.zeros(0, dtype=torch.long), torch.zeros(0, K, dtype=torch.long)
    )
    assert empty == 0


@pytest.mark.parametrize("draft", [None, (0, 2, 3, 9, 16)])
@pytest.mark.parametrize("chunked", [False, True])
def test_soft_labels_against_the_formula(
    monkeypatch: pytest.MonkeyPatch, chunked: bool, draft: tuple[int, ...] | None
) -> None:
    """Head k at position p learns what the backbone says at position p + 1 + k, beside the true token."""
    if chunked:
        monkeypatch.setattr(loss_module, "CHUNK_ENTRIES", 1)
    heads = random_heads(MedusaConfig(num_heads=K, draft_vocab=draft), LogitTransform(scale=0.5, softcap=3.0))
    weight, bias = torch.randn(V, D), torch.randn(V)
    hidden, root, targets = torch.randn(P, D), torch.zeros(P, dtype=torch.long), torch.randint(0, V, (P, K))
    for k in range(K):
        targets[P - 1 - k :, k] = IGNORE  # the answer ends
    loss = HeadLoss(heads, 0.8, soft_labels=0.7, label_smoothing=0.1, lm_head=(weight, bias))
    total, _ = loss(hidden, root, targets)
    gradients = torch.autograd.grad(total, list(heads.parameters()))

    chosen = list(range(V)) if draft is None else list(draft)
    teacher = heads.transform(hidden @ weight.T + bias)[:, chosen].softmax(dim=-1)
    logits = heads(hidden, root)
    expected = torch.zeros(())
    for k in range(K):
        for p in range(P):
            target = int(targets[p, k])
            if target not in chosen:
                continue
            said = logits[k, p].log_softmax(dim=-1)
            hard = -(0.9 * said[chosen.index(target)] + 0.1 * said.mean())
            soft = (teacher[p + 1 + k] * (teacher[p + 1 + k].log() - said)).sum()
            expected = expected + 0.8**k * (0.3 * hard + 0.7 * soft)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, list(heads.parameters())), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)
    assert not weight.requires_grad


@pytest.mark.parametrize("soft", [0.0, 0.5])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, projection: str, soft: float) -> None:
    """Report R11: relative to their size, values and gradients of every head agree to 1e-6."""
    positions = 64
    heads = random_heads(MedusaConfig(num_heads=K, projection=projection, root_conditioned=True), LogitTransform())
    loss = HeadLoss(heads, 0.8, soft_labels=soft, lm_head=(torch.randn(V, D), None))
    hidden, root = torch.randn(positions, D), torch.randint(0, V, (positions,))
    targets = torch.randint(0, V, (positions, K))
    targets[10:14] = IGNORE
    plain, plain_heads = loss(hidden, root, targets)
    expected = torch.autograd.grad(plain, list(heads.parameters()))
    monkeypatch.setattr(loss_module, "CHUNK_ENTRIES", 7 * V * K)
    chunked, chunked_heads = loss(hidden, root, targets)
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked_heads, plain_heads, rtol=1e-6, atol=0)
    for found, reference in zip(torch.autograd.grad(chunked, list(heads.parameters())), expected, strict=True):
        assert (found - reference).norm() <= 1e-6 * reference.norm()
