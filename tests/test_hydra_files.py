"""Heads of the Hydra repository: they guess here what they guess there, and what cannot be decoded is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from console import medusa
from safetensors.torch import save_file
from tiny import VOCAB, hf_greedy, prompt_of, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa import MedusaModel

HEADS, WIDTH = 3, 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_model("llama").float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def backbone(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()


class Block(nn.Module):
    """SiLU of one map of the input beside another map of it, or beside the input itself."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear((tokens + 1) * WIDTH, WIDTH)
        self.res_connection = nn.Linear((tokens + 1) * WIDTH, WIDTH) if tokens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        changed = self.linear(x)
        return changed * torch.sigmoid(changed) + self.res_connection(x)


class Published(nn.Module):
    """What the Hydra repository trains: its heads look along a whole text at once.

    There, the blocks of a head behind its first are one block, so the file holds its weights several times.
    """

    def __init__(self, backbone: PreTrainedModel, layers: int, grounded: bool = True) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.input_embed_fn, self.grounded = backbone.get_input_embeddings(), grounded
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(Block(i + 1 if grounded else 0), *[Block(0)] * (layers - 1)) for i in range(HEADS)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(HEADS))
        with torch.no_grad():
            for part in (self.hydra_mlp, self.hydra_lm_head):
                for parameter in part.parameters():
                    parameter.normal_(std=0.3)

    @torch.no_grad()
    def forward(self, hidden: Tensor, ids: Tensor) -> list[Tensor]:
        """Of every head, its logits at each place, [T, V]: hidden [T, D], ids [T]; what is past the end is wrong."""
        seen, logits = [hidden], []
        for i in range(HEADS):
            if self.grounded:
                seen.append(self.input_embed_fn(ids.roll(-1 - i)))
            logits.append(self.hydra_lm_head[i](self.hydra_mlp[i](torch.cat(seen, dim=1))))
        return logits


def entries_of(base: Path, layers: int, **changes: Any) -> dict[str, Any]:
    return {
        "hydra_num_heads": HEADS,
        "hydra_num_layers": layers,
        "hydra_head_arch": "mlp",
        "base_model_name_or_path": str(base),
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "model_type": "",
        **changes,
    }


def write(directory: Path, tensors: dict[str, Tensor], entries: dict[str, Any], file: str = "hydra_lm_head.pt") -> Path:
    directory.mkdir()
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / file)
    else:
        torch.save(tensors, directory / file)
    (directory / "config.json").write_text(json.dumps(entries))
    return directory


def close(found: Tensor, expected: Tensor) -> None:
    """To a millionth of the largest logit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def check_logits(loaded: MedusaModel, published: Published) -> None:
    """Every head behind the true text, and behind paths that it does not hold."""
    text = prompt_of(20)[0]
    with torch.no_grad():
        hidden = loaded.backbone.hidden(text[None])[0]
    other = text.clone()
    other[1::2] = prompt_of(10, seed=1)[0]
    for ids in (text, other):
        expected = published(hidden, ids)
        last = len(ids) - HEADS
        following = torch.stack([ids[2 + i : 2 + i + last] for i in range(HEADS - 1)], dim=1)
        with torch.no_grad():
            found = loaded.heads(hidden[:last], ids[1 : 1 + last], following)
        for i in range(HEADS):
            close(found[i], expected[i][:last])
            path = torch.stack([ids[1 + j : 1 + j + last] for j in range(i + 1)], dim=1)
            with torch.no_grad():
                alone = loaded.heads.forward_one(i, hidden[:last], path)
            close(alone, expected[i][:last])


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "hydra_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("grounded", [True, False])
def test_heads_guess_what_they_guess_there_before_and_after_a_native_save(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, grounded: bool, layers: int, file: str
) -> None:
    published = Published(backbone, layers, grounded)
    entries = entries_of(base, layers, grounded_heads=grounded)
    directory = write(tmp_path / "h", published.state_dict(), entries, file)
    loaded = MedusaModel.from_pretrained(directory)  # the backbone that config.json names
    assert (loaded.config.num_heads, loaded.config.num_layers) == (HEADS, layers)
    assert (loaded.config.sequential, loaded.config.embedding_scale) == (grounded, "raw" if grounded else "unit")
    check_logits(loaded, published)

    loaded.save_pretrained(tmp_path / "native")
    again = MedusaModel.from_pretrained(tmp_path / "native", backbone=backbone)
    assert again.config == loaded.config
    assert again.heads.state_dict().keys() == loaded.heads.state_dict().keys()
    for name, tensor in loaded.heads.state_dict().items():
        assert torch.equal(again.heads.state_dict()[name], tensor)
    check_logits(again, published)


def test_an_embedding_at_unit_size_gives_other_guesses(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    """Else the comparison above proves nothing."""
    published = Published(backbone, 1)
    write(tmp_path / "h", published.state_dict(), entries_of(base, 1))
    MedusaModel.from_pretrained(tmp_path / "h", backbone=backbone).save_pretrained(tmp_path / "native")
    file = tmp_path / "native" / "config.json"
    file.write_text(file.read_text().replace('"medusa_embedding_scale": "raw"', '"medusa_embedding_scale": "unit"'))
    with pytest.raises(AssertionError, match="not close"):
        check_logits(MedusaModel.from_pretrained(tmp_path / "native", backbone=backbone), published)


@pytest.mark.parametrize("grounded", [True, False])
def test_greedy_decoding_is_what_the_backbone_says(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, grounded: bool
) -> None:
    from medusa.inference import MedusaDecoder

    directory = write(
        tmp_path / "h", Published(backbone, 2, grounded).state_dict(), entries_of(base, 2, grounded_heads=grounded)
    )
    decoder = MedusaDecoder(MedusaModel.from_pretrained(directory), tree=[(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
    for length in (3, 8):
        found = decoder.generate(prompt_of(length), max_new_tokens=24).sequences
        assert torch.equal(found, hf_greedy(backbone, prompt_of(length), 24))


@pytest.mark.filterwarnings("ignore:.*hydra_num_layers 1, but there are 2")
def test_a_configuration_that_counts_wrong(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    published = Published(backbone, 2)
    directory = write(tmp_path / "h", published.state_dict(), entries_of(base, 1, hydra_num_heads=5))
    with pytest.warns(UserWarning, match="hydra_num_heads 5, but there are 3; the tensors count"):
        check_logits(MedusaModel.from_pretrained(directory, backbone=backbone), published)


def test_neither_configuration_nor_embedding_is_needed(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    published = Published(backbone, 2)
    tensors = published.state_dict()
    del tensors["input_embed_fn.weight"]
    directory = write(tmp_path / "h", tensors, {})
    (directory / "config.json").unlink()
    check_logits(MedusaModel.from_pretrained(directory, backbone=backbone), published)
    with pytest.raises(ValueError, match="does not say whose heads"):
        MedusaModel.from_pretrained(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hydra_mlp.1.0.linear.weight": None}, r"lacks hydra_mlp\.1\.0\.linear\.weight of"),
        ({"hydra_mlp.0.0.res_connection.bias": None}, r"lacks hydra_mlp\.0\.0\.res_connection\.bias of"),
        (
            {f"hydra_mlp.{i}.0.res_connection.{kind}": None for i in range(HEADS) for kind in ("weight", "bias")},
            r"lacks hydra_mlp\.0\.0\.res_connection\.weight, hydra_mlp\.0\.0\.res_connection\.bias, hydra_mlp\.1",
        ),
        ({"hydra_mlp.2.1.linear.bias": None}, r"lacks hydra_mlp\.2\.1\.linear\.bias of"),
        ({"hydra_lm_head.1.bias": None}, r"lacks hydra_lm_head\.1\.bias of"),
        ({"hydra_lm_head.7.weight": torch.ones(VOCAB, WIDTH)}, r"lacks hydra_mlp\.3\.0\.linear\.weight"),
        ({"hydra_mlp.0.1.res_connection.weight": torch.ones(WIDTH, WIDTH)}, r"holds hydra_mlp\.0\.1\.res_.*no Hydra"),
        ({"noise": torch.ones(1)}, "holds noise, which no Hydra head"),
        ({"hydra_mlp.0.0.linear.bias": torch.full((WIDTH,), torch.nan)}, r"hydra_mlp\.0\.0\.linear\.bias holds NaN"),
        ({"hydra_mlp.1.0.linear.weight": torch.ones(WIDTH, 64)}, r"1\.0\.linear\.weight .* needs \(32, 96\)"),
        ({f"hydra_lm_head.{i}.weight": torch.ones(VOCAB + 9, WIDTH) for i in range(HEADS)}, "padded or extended"),
        ({"input_embed_fn.weight": torch.ones(VOCAB, WIDTH)}, "is not the input embedding of this backbone"),
        ({"input_embed_fn.weight": torch.ones(VOCAB + 1, WIDTH)}, r"shape \(98, 32\), is not the input embedding"),
    ],
)
def test_what_is_wrong_with_tensors_is_named(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    whole: dict[str, Tensor | None] = {**Published(backbone, 2).state_dict(), **changes}
    tensors = {name: tensor for name, tensor in whole.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        MedusaModel.from_pretrained(write(tmp_path / "h", tensors, entries_of(base, 2)), backbone=backbone)


def test_an_embedding_in_half_precision_is_the_same(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    tensors = Published(backbone, 1).state_dict()
    tensors["input_embed_fn.weight"] = tensors["input_embed_fn.weight"].bfloat16()
    MedusaModel.from_pretrained(write(tmp_path / "h", tensors, entries_of(base, 1)), backbone=backbone)


SHIFTED = {"hydra_mlp.0.1.linear.weight": torch.ones(WIDTH, 64), "hydra_lm_head.0.1.weight": torch.ones(VOCAB, WIDTH)}
EMBEDDED = {"input_embed_fn.weight": torch.ones(VOCAB, WIDTH)}


@pytest.mark.parametrize(
    ("tensors", "arch", "reason"),
    [
        (SHIFTED | {"prefix_embeding_layer.layers.0.mlp.up_proj.weight": torch.ones(2)}, "prefix-mlp", "Hydra\\+\\+"),
        (SHIFTED, "prefix-mlp", "Hydra\\+\\+"),
        (EMBEDDED | {"cross_attn.q_proj.weight": torch.ones(2)}, "cross-attn", "hidden states of the whole text"),
        (EMBEDDED | {"attn.self_attn.q_proj.weight": torch.ones(2), "fc.bias": torch.ones(2)}, "eagle-attn", "EAGLE"),
        (EMBEDDED, "new-arch", "not known here"),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_other_architectures_are_refused_by_name(
    backbone: PreTrainedModel, tmp_path: Path, tensors: dict[str, Tensor], arch: str, reason: str, told: bool
) -> None:
    """By their tensors, whatever config.json says; where tensors do not tell, by config.json."""
    entries = {"hydra_head_arch": arch if told or arch == "new-arch" else "mlp"}
    with pytest.raises(ValueError, match=rf"architecture '{arch}', which need .*{reason}.*'mlp' load"):
        MedusaModel.from_pretrained(write(tmp_path / "h", tensors, entries), backbone=backbone)


def test_heads_on_an_inner_layer_are_refused(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "h", Published(backbone, 1).state_dict(), entries_of(base, 1, hidden_state_offset=2))
    with pytest.raises(ValueError, match=r"2 layers before the last \(hidden_state_offset\)"):
        MedusaModel.from_pretrained(directory, backbone=backbone)


def test_inspect_shows_them(backbone: PreTrainedModel, base: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "h", Published(backbone, 2).state_dict(), entries_of(base, 2))
    shown = json.loads(medusa("inspect", directory, "--json"))
    assert (shown["format"], shown["heads"], shown["layers"], shown["vocab_size"]) == ("hydra", HEADS, 2, VOCAB)
    assert (shown["sequential"], shown["embedding_scale"], shown["hidden_size"]) == (True, "raw", WIDTH)
    MedusaModel.from_pretrained(directory).save_pretrained(tmp_path / "native")
    native = json.loads(medusa("inspect", tmp_path / "native", "--json"))
    same = ("backbone", "heads", "layers", "projection", "sequential", "embedding_scale", "hidden_size", "vocab_size")
    assert {key: native[key] for key in same} == {key: shown[key] for key in same}
    assert native["parameters"] == shown["parameters"]


@pytest.mark.parametrize(("grounded", "message"), [(True, "heads.sequential is true"), (False, "has a bias")])
def test_engines_cannot_run_them(
    backbone: PreTrainedModel, base: Path, tmp_path: Path, grounded: bool, message: str
) -> None:
    from medusa.export import export

    tensors = Published(backbone, 1, grounded).state_dict()
    directory = write(tmp_path / "h", tensors, entries_of(base, 1, grounded_heads=grounded))
    MedusaModel.from_pretrained(directory).save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "native", "vllm", tmp_path / "out")
