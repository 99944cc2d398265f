"""Heads on the hub: what is uploaded, that it comes back the same, and that transformers decodes with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chatml import byte_tokenizer, save_tiny_chat_model
from console import medusa
from fake_hub import FakeHub, fake_hub
from safetensors.torch import load
from tiny import tiny_medusa
from transformers import AutoModelForCausalLM

from medusa.checkpoint import HEADS_FILE
from medusa.hub import prepare, push
from medusa.model_card import model_card
from medusa.tree_search import search_tree

OWN = {"root_conditioned": True}
LOAD = """
import sys
from medusa import MedusaModel
MedusaModel.from_pretrained(sys.argv[1]).push_to_hub("user/again")
"""
DECODE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[5, 17, 40, 8, 3, 60]])
plain = model.generate(ids, max_new_tokens=12, do_sample=False)
for _ in range(2):
    found = model.generate(
        ids, max_new_tokens=12, do_sample=False, custom_generate=sys.argv[2], trust_remote_code=True
    )
assert torch.equal(found, plain), (found, plain)
(decoder,) = model.medusa_decoders.values()
print("tree", decoder.proposer.sizes[-1])
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Heads with a tree, an evaluation, provenance and a tokenizer."""
    backbone = AutoModelForCausalLM.from_pretrained(save_tiny_chat_model(tmp_path / "model")).eval()
    model = tiny_medusa(backbone, num_heads=2, **OWN)
    model.searched_tree = search_tree(torch.tensor([[0, 0], [0, 1], [1, 0], [2, 2]]), 8)
    directory = tmp_path / "heads"
    facts = {"versions": {"torch": "2.13.0"}, "seed": 7, "config": {"optimization": {"epochs": 3}}}
    model.save_pretrained(directory, byte_tokenizer(), facts)
    accuracy = {"top1": [0.5, 0.25], "top5": [0.7, 0.5], "top10": [0.8, 0.6], "positions": [100, 90]}
    (directory / "evaluation.json").write_text(json.dumps(accuracy))
    return directory


def run(code: str, *arguments: str, hub: FakeHub | None = None, home: Path) -> str:
    """In a process of its own, as a user would: the hub's address is read when huggingface_hub is imported."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    environment["HF_HUB_DISABLE_XET"] = "1"
    if hub is not None:
        environment["HF_ENDPOINT"] = hub.address
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_pushed_heads_come_back_and_decode(checkpoint: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        pushing = "from medusa.cli import main; import sys; sys.argv[0] = 'medusa'; main()"
        said = run(pushing, "push", str(checkpoint), "user/heads", "--json", hub=hub, home=tmp_path / "home")
        assert json.loads(said) == {"repository": f"{hub.address}/user/heads"}
        files = hub.repositories["user/heads"]
        assert files[HEADS_FILE] == (checkpoint / HEADS_FILE).read_bytes()
        assert b"user/heads" in files["custom_generate/generate.py"]
        assert files["tree.svg"].startswith(b"<svg")

        run(LOAD, "user/heads", hub=hub, home=tmp_path / "home")
        was, now = load(files[HEADS_FILE]), load(hub.repositories["user/again"][HEADS_FILE])
        assert was.keys() == now.keys()
        assert all(torch.equal(was[name], now[name]) for name in was)

        assert "tree" in run(DECODE, str(checkpoint.parent / "model"), "user/heads", hub=hub, home=tmp_path / "home")


def test_a_local_directory_decodes_too(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    medusa("push", str(checkpoint), "--dry-run", str(out))
    assert "tree" in run(DECODE, str(checkpoint.parent / "model"), str(out), home=tmp_path / "home")
    with pytest.raises(AssertionError, match="ended with 1"):
        medusa("push", str(checkpoint), "--dry-run", str(checkpoint))
    assert (checkpoint / HEADS_FILE).exists()


def test_the_card_says_what_the_directory_holds(checkpoint: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "bench.md").write_text("| heads | 1.52 |\n")
    prepare(checkpoint, tmp_path / "out", "user/heads", "apache-2.0", bench)
    card = (tmp_path / "out" / "README.md").read_text()
    header, text = card.split("---")[1], card.split("---", 2)[2]
    assert "license: apache-2.0" in header
    assert "library_name: medusa-heads" in header
    for said in ("2 root-conditioned heads", "| 0 | 50.0% | 70.0% | 80.0% | 100 |", "| heads | 1.52 |", "tree.svg"):
        assert said in text
    assert 'custom_generate="user/heads"' in text
    assert '"epochs": 3' in text
    assert "do not read these heads" in text


def test_plain_heads_are_said_to_run_in_engines(tmp_path: Path) -> None:
    backbone = AutoModelForCausalLM.from_pretrained(save_tiny_chat_model(tmp_path / "model")).eval()
    tiny_medusa(backbone, num_heads=2).save_pretrained(tmp_path / "plain")
    tiny_medusa(backbone, num_heads=2, draft_vocab=(1, 2, 3)).save_pretrained(tmp_path / "draft")
    assert "TensorRT-LLM read this directory" in model_card(tmp_path / "plain", "user/heads", None)
    assert "do not read these heads" in model_card(tmp_path / "draft", "user/heads", None)


def test_what_the_hub_refuses_is_said(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"did not take 'a/b/c'.*USER/NAME"):
        push(checkpoint, "a/b/c")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"holds no bench\.md"):
        prepare(checkpoint, tmp_path / "out", "user/heads", None, tmp_path / "none")


def test_heads_of_an_adapted_backbone_are_not_put_on_the_plain_one(checkpoint: Path) -> None:
    from medusa.inference import generate_with

    (checkpoint / "adapter").mkdir()
    model = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "model")
    with pytest.raises(ValueError, match="medusa merge"):
        generate_with(str(checkpoint), model, inputs=torch.tensor([[1, 2]]))
