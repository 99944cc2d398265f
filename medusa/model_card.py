"""The page that the hub shows of a checkpoint, written from what lies in its directory."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from .checkpoint import (
    ADAPTER_FOLDER,
    BACKBONE_FOLDER,
    DRAFT_VOCAB,
    DRIFT_FILE,
    EVALUATION_FILE,
    HEADS_FILE,
    PROVENANCE_FILE,
    read_config,
)
from .tree_search import TREE_FILE, SearchedTree

TREE_PICTURE = "tree.svg"
BENCH_FILE = "bench.md"
"""What `medusa bench --out` writes."""
SIZES = (4, 8, 16, 32, 64)


def model_card(directory: Path, repository: str, license_: str | None) -> str:
    """The card of the checkpoint in `directory`.

    Args:
        directory: of the checkpoint; what it does not hold, such as a bench.md, the card does not speak of.
        repository: where it will be, for the commands on the card.
        license_: of the heads, which are made of their backbone and so follow its licence; None: not said.

    Raises:
        ValueError: there is no checkpoint, or one of its files is damaged.
    """
    entries = read_config(directory)
    base = str(entries.get("base_model_name_or_path", ""))
    data = ModelCardData(
        base_model=None if Path(base).is_dir() or not base else base,
        base_model_relation="adapter",
        library_name="medusa-heads",
        license=license_,
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", "custom_generate"],
    )
    parts = [
        f"# Medusa heads for {Path(base).name or 'a causal language model'}",
        _what(directory, entries, base),
        _accuracy(directory),
        _tree(directory),
        _speed(directory),
        _drift(directory),
        _use(directory, repository, entries, base),
        _training(directory),
    ]
    if license_ is None:
        parts.append("No licence is given here: that of the backbone applies to what was made of it.")
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"))


def runs_in_engines(directory: Path, entries: dict[str, Any]) -> bool:
    """Whether serving engines read these heads as they are: they feed heads the hidden state alone."""
    sees_tokens = entries.get("medusa_root_conditioned", False) or entries.get("medusa_sequential", False)
    with safe_open(directory / HEADS_FILE, framework="pt") as handle:
        whole_vocabulary = DRAFT_VOCAB not in handle.keys()  # noqa: SIM118 (not a dict)
    plain = not sees_tokens and not entries.get("medusa_projection_bias", False)
    return plain and whole_vocabulary and entries.get("medusa_projection", "own") == "own"


def _what(directory: Path, entries: dict[str, Any], base: str) -> str:
    kind = "sequential (Hydra) " if entries.get("medusa_sequential") else ""
    kind = "root-conditioned " if entries.get("medusa_root_conditioned") else kind
    text = (
        f"{entries['medusa_num_heads']} {kind}heads that guess ahead of `{base}` (hidden size "
        f"{entries.get('hidden_size')}, vocabulary {entries.get('vocab_size')}); one pass of the model checks their "
        "guesses, so that it answers faster and says what it would have said."
    )
    if (directory / BACKBONE_FOLDER).is_dir():
        text += f" The backbone learned with them; it lies in `{BACKBONE_FOLDER}/`."
    if (directory / ADAPTER_FOLDER).is_dir():
        text += f" The backbone learned with them; its LoRA adapter lies in `{ADAPTER_FOLDER}/`."
    return text


def _accuracy(directory: Path) -> str:
    found = _read(directory / EVALUATION_FILE)
    if found is None:
        return ""
    columns = zip(found["top1"], found["top5"], found["top10"], found["positions"], strict=True)
    rows = [f"| {k} | {one:.1%} | {five:.1%} | {ten:.1%} | {n} |" for k, (one, five, ten, n) in enumerate(columns)]
    head = ["| head | top-1 | top-5 | top-10 | positions |", "|---|---|---|---|---|"]
    return "\n".join(["## Accuracy on held-out text", "", *head, *rows])


def _tree(directory: Path) -> str:
    if not (directory / TREE_FILE).exists():
        return ""
    searched = SearchedTree.load(directory)
    sizes = [size for size in SIZES if size <= len(searched.paths) + 1]
    rows = [f"| {size} | {searched.tokens_per_step(size):.2f} |" for size in sizes]
    head = ["| nodes | expected tokens per step |", "|---|---|"]
    told = (
        f"Counted over {searched.positions} steps of held-out text. Tokens per step = emitted tokens / verify passes."
    )
    return "\n".join(["## Candidate tree", "", f"![The tree]({TREE_PICTURE})", "", *head, *rows, "", told])


def _speed(directory: Path) -> str:
    file = directory / BENCH_FILE
    return f"## Speed\n\nMeasured with `medusa bench`:\n\n{file.read_text().strip()}" if file.exists() else ""


def _drift(directory: Path) -> str:
    drift = _read(directory / DRIFT_FILE)
    if drift is None:
        return ""
    rows = [f"- {name.replace('_', ' ')}: {value:.4g}" for name, value in drift.items()]
    return "\n".join(["## How far the backbone moved", "", *rows])


USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{base}")
tokenizer = AutoTokenizer.from_pretrained("{base}")
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=128, custom_generate="{repository}", trust_remote_code=True)
```

This needs `pip install medusa-heads`, and so does the decoder with all its options:

```python
from medusa import MedusaModel
from medusa.inference import MedusaDecoder

decoder = MedusaDecoder(MedusaModel.from_pretrained("{repository}"), tree="auto")
```

{engines}"""
READ_BY_ENGINES = (
    "vLLM up to 0.32 (`--speculative-config`), TGI and TensorRT-LLM read this directory as it is. The first two check "
    "one chain of first guesses, TensorRT-LLM a tree."
)
NOT_READ_BY_ENGINES = (
    "vLLM, TGI and TensorRT-LLM do not read these heads as they are; `medusa export` says what can be written for "
    "which engine."
)


def _use(directory: Path, repository: str, entries: dict[str, Any], base: str) -> str:
    engines = READ_BY_ENGINES if runs_in_engines(directory, entries) else NOT_READ_BY_ENGINES
    return USE.format(base=base, repository=repository, engines=engines)


def _training(directory: Path) -> str:
    facts = _read(directory / PROVENANCE_FILE)
    if facts is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    lines = ["## Training", "", f"Versions: {versions}. Seed {facts.get('seed')}."]
    if "config" in facts:
        lines += ["", "```json", json.dumps(facts["config"], indent=2), "```"]
    return "\n".join(lines)


def _read(file: Path) -> Any:
    """A JSON file's content; None where there is no such file."""
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}); remove it, or make it again") from error
