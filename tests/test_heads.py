"""The heads as functions: what they start as, what they see, how their tensors are called."""

import pytest
import torch
from tiny import VOCAB, prompt_of, shared_model, tiny_medusa
from torch import nn
from torch.nn import functional as F

from medusa import MedusaConfig, MedusaModel
from medusa.heads import LogitTransform, MedusaHeads

DRAFT = (0, 3, 4, 50, VOCAB - 1)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3", "granite"])
@pytest.mark.parametrize("sees", [None, "root_conditioned", "sequential"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT], ids=["full", "draft"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_fresh_heads_are_the_backbone(
    name: str, projection: str, draft_vocab: tuple[int, ...] | None, num_layers: int, sees: str | None
) -> None:
    """Phi has a bias, gemma3 a softcap, granite a scale: all three are part of what a head starts as."""
    model = shared_model(name)
    medusa = MedusaModel.attach(
        model,
        MedusaConfig(
            num_heads=3,
            num_layers=num_layers,
            projection=projection,
            draft_vocab=draft_vocab,
            **({} if sees is None else {sees: True}),
        ),
    )
    ids = prompt_of(7)
    with torch.no_grad():
        logits = medusa.heads(medusa.backbone.hidden(ids)[0], ids[0], prompt_of(14)[0].view(7, 2))
        expected = model(input_ids=ids).logits[0]
    if draft_vocab is not None:
        expected = expected[:, list(draft_vocab)]
    assert logits.shape == (3, 7, medusa.heads.draft_size)
    torch.testing.assert_close(logits, expected.expand(3, -1, -1), rtol=1e-12, atol=1e-12)


def test_heads_are_copies() -> None:
    """Training heads of their own must not reach the LM head, and the other way round the shared one is the LM head."""
    model = shared_model("llama")
    own = MedusaModel.attach(model, MedusaConfig(num_heads=2)).heads
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert pointers.isdisjoint(parameter.data_ptr() for parameter in own.parameters())
    shared = MedusaModel.attach(model, MedusaConfig(num_heads=2, projection="shared")).heads
    assert shared.shared_weight is not None
    assert shared.shared_weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not shared.shared_weight.requires_grad


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, {f"{i}.{name}" for i in range(2) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}),
        (
            {"num_layers": 2, "draft_vocab": DRAFT, "root_conditioned": True},
            {
                f"{i}.{name}"
                for i in range(2)
                for name in ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")
            },
        ),
        ({"projection": "shared"}, {f"{i}.0.linear.{name}" for i in range(2) for name in ("weight", "bias")}),
        (
            {"projection": "shared", "num_layers": 2, "sequential": True},
            {
                f"{i}.{name}.{part}"
                for i in range(2)
                for name in ("0.linear", "0.res_connection", "1.linear")
                for part in ("weight", "bias")
            },
        ),
    ],
    ids=["own", "two layers", "shared", "sequential"],
)
def test_tensors_are_called_as_in_the_reference(config: dict[str, object], names: set[str]) -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=2, **config).heads
    assert set(heads.state_dict()) == names
    assert {name for name, _ in heads.named_parameters()} == names


def test_projection_has_a_bias_where_the_lm_head_has_one() -> None:
    medusa = MedusaModel.attach(shared_model("phi"), MedusaConfig(num_heads=1))
    assert "0.1.bias" in medusa.heads.state_dict()
    assert torch.equal(medusa.heads.state_dict()["0.1.bias"], shared_model("phi").lm_head.bias)


def test_layers_are_distinct_blocks() -> None:
    """Slow reference: two blocks in a row, each with its own weights."""
    medusa = tiny_medusa(shared_model("llama"), num_heads=2, num_layers=2)
    state = medusa.heads.state_dict()
    assert state["0.0.linear.weight"].data_ptr() != state["0.1.linear.weight"].data_ptr()
    hidden, root = torch.randn(5, 32, dtype=torch.float64), prompt_of(5)[0]
    logits = medusa.heads(hidden, root)
    for k in range(2):
        x = hidden
        for layer in range(2):
            z = x @ state[f"{k}.{layer}.linear.weight"].T + state[f"{k}.{layer}.linear.bias"]
            x = x + z * torch.sigmoid(z)
        torch.testing.assert_close(logits[k], x @ state[f"{k}.2.weight"].T)


def test_root_conditioned_heads_see_the_root() -> None:
    hidden = torch.randn(1, 32, dtype=torch.float64)
    one, other = torch.tensor([5]), torch.tensor([6])
    plain = tiny_medusa(shared_model("llama"), num_heads=2, num_layers=2).heads
    assert torch.equal(plain(hidden, one), plain(hidden, other))
    seeing = tiny_medusa(shared_model("llama"), num_heads=2, num_layers=2, root_conditioned=True).heads
    assert all(not torch.allclose(a, b) for a, b in zip(seeing(hidden, one), seeing(hidden, other), strict=True))
    state = seeing.state_dict()
    assert state["0.0.linear.weight"].shape == (32, 64)
    assert state["0.1.linear.weight"].shape == (32, 32), "the root is seen by the first block only"


def test_sequential_heads_see_the_path() -> None:
    """Slow reference: head k on the hidden state and the embeddings, at unit size, of the root and k tokens more."""
    medusa = tiny_medusa(shared_model("llama"), num_heads=3, num_layers=2, sequential=True)
    state, table = medusa.heads.state_dict(), medusa.backbone.root_table
    hidden, path = torch.randn(5, 32, dtype=torch.float64), prompt_of(15)[0].view(5, 3)
    logits = medusa.heads(hidden, path[:, 0], path[:, 1:])
    for k in range(3):
        for p in range(5):
            seen = [
                table[token] / (table[token].square().mean() + torch.finfo(table.dtype).eps).sqrt()
                for token in path[p, : k + 1]
            ]
            x = torch.cat([hidden[p], *seen])
            x = (state[f"{k}.0.res_connection.weight"] @ x + state[f"{k}.0.res_connection.bias"]) + F.silu(
                state[f"{k}.0.linear.weight"] @ x + state[f"{k}.0.linear.bias"]
            )
            x = x + F.silu(state[f"{k}.1.linear.weight"] @ x + state[f"{k}.1.linear.bias"])
            torch.testing.assert_close(logits[k, p], state[f"{k}.2.weight"] @ x)
        torch.testing.assert_close(medusa.heads.forward_one(k, hidden, path[:, : k + 1]), logits[k])
    with pytest.raises(AssertionError, match="head 1 sees 2 tokens and is given 1"):
        medusa.heads(hidden, path[:, 0])


def test_size_of_the_embedding_does_not_matter() -> None:
    """Backbones differ widely in the size of their embeddings; the heads see them at unit size."""

    def logits(size: float) -> torch.Tensor:
        torch.manual_seed(0)
        table, lm_weight = torch.randn(9, 8).double() * size, torch.randn(9, 8).double()
        heads = MedusaHeads(MedusaConfig(num_heads=1, root_conditioned=True), lm_weight, None, table, LogitTransform())
        nn.init.normal_(heads.state_dict()["0.0.linear.weight"])
        return heads(torch.randn(2, 8).double(), torch.tensor([1, 2]))

    torch.testing.assert_close(logits(1.0), logits(100.0), rtol=1e-4, atol=1e-4)


def test_raw_embeddings_are_seen_as_the_backbone_has_them() -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=1, root_conditioned=True, embedding_scale="raw")
    state, table = medusa.heads.state_dict(), medusa.backbone.root_table
    hidden, root = torch.randn(5, 32, dtype=torch.float64), prompt_of(5)[0]
    x = torch.cat([hidden, table[root]], dim=1)
    x = hidden + F.silu(x @ state["0.0.linear.weight"].T + state["0.0.linear.bias"])
    torch.testing.assert_close(medusa.heads(hidden, root)[0], x @ state["0.1.weight"].T)


def test_a_projection_bias_of_its_own_starts_at_zero() -> None:
    heads = MedusaModel.attach(shared_model("llama"), MedusaConfig(num_heads=1, projection_bias=True)).heads
    assert not heads.state_dict()["0.1.bias"].any()
    copied = MedusaModel.attach(shared_model("phi"), MedusaConfig(num_heads=1, projection_bias=True)).heads
    assert torch.equal(copied.state_dict()["0.1.bias"], shared_model("phi").lm_head.bias)
    with pytest.raises(ValueError, match=r"projection_bias is true, but the heads share"):
        MedusaConfig(projection="shared", projection_bias=True)


def test_draft_ids_round_trip() -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=1, draft_vocab=DRAFT).heads
    assert heads.draft_size == len(DRAFT)
    index = torch.arange(len(DRAFT))
    assert heads.to_vocab(index).tolist() == list(DRAFT)
    assert heads.to_draft(torch.tensor(DRAFT)).tolist() == index.tolist()
    expected = [DRAFT.index(token) if token in DRAFT else -100 for token in range(VOCAB)]
    assert heads.to_draft(torch.arange(VOCAB)).tolist() == expected
    assert heads.to_draft(torch.tensor([[-100, -1], [3, 5]])).tolist() == [[-100, -100], [1, -100]]
    assert heads.to_draft(torch.tensor([[0, 3], [4, 50]]).T).tolist() == [[0, 2], [1, 3]]  # not contiguous


def test_full_vocabulary_ids_stay() -> None:
    heads = tiny_medusa(shared_model("llama"), num_heads=1).heads
    assert heads.draft_size == VOCAB
    ids = torch.tensor([0, 5, VOCAB - 1])
    assert torch.equal(heads.to_vocab(ids), ids)
    assert torch.equal(heads.to_draft(ids), ids)
    assert heads.to_draft(torch.tensor([-100, -1, 2])).tolist() == [-100, -100, 2]


def test_draft_vocabulary_must_fit_the_lm_head() -> None:
    with pytest.raises(ValueError, match=f"token id {VOCAB}.*{VOCAB} rows"):
        MedusaModel.attach(shared_model("llama"), MedusaConfig(draft_vocab=[1, VOCAB]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_heads", "4"),
        ("num_layers", 1.5),
        ("projection", "mine"),
        ("root_conditioned", "no"),
        ("sequential", 1),
        ("embedding_scale", "large"),
        ("embedding_scale", "raw"),
        ("projection_bias", "yes"),
        ("draft_vocab", []),
        ("draft_vocab", [3, 2]),
        ("draft_vocab", [2, 2]),
        ("draft_vocab", [-1, 2]),
    ],
)
def test_config_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"MedusaConfig.{field}"):
        MedusaConfig(**{field: value})


def test_sequential_heads_see_the_root_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"root_conditioned and MedusaConfig.sequential.*leave root_conditioned out"):
        MedusaConfig(root_conditioned=True, sequential=True)


def test_logit_transform() -> None:
    x = torch.linspace(-20, 20, 9, dtype=torch.float64)
    assert torch.equal(LogitTransform()(x), x)
    torch.testing.assert_close(LogitTransform(scale=0.25)(x), x / 4)
    torch.testing.assert_close(LogitTransform(softcap=5.0)(x), 5 * torch.tanh(x / 5))
    torch.testing.assert_close(LogitTransform(scale=2.0, softcap=5.0)(x), 5 * torch.tanh(2 * x / 5))


@pytest.mark.parametrize("draft_vocab", [None, range(50, VOCAB)], ids=["full", "draft"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_padding_of_the_vocabulary_is_never_guessed(projection: str, draft_vocab: range | None) -> None:
    medusa = tiny_medusa(shared_model("llama"), num_heads=2, projection=projection, draft_vocab=draft_vocab)
    medusa.limit_tokens(80)
    logits = medusa.heads(torch.randn(5, 32, dtype=torch.float64), torch.arange(5))
    known = medusa.heads.to_vocab(torch.arange(medusa.heads.draft_size)) < 80
    assert logits[..., known].isfinite().all()
    assert (logits[..., ~known] == -torch.inf).all()
    with pytest.raises(ValueError, match=f"ids up to 99, but the backbone's LM head has {VOCAB} rows"):
        medusa.limit_tokens(100)
