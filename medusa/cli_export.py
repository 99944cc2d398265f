"""`medusa export`: heads for a serving engine."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Checkpoint, Dtype, Json, load, note, show

MAX_LENGTH = 2048
"""Of held-out chats, in tokens."""


def export(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option(help="native, reference, vllm, tgi or tensorrt-llm.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write; unsaid: CHECKPOINT-ENGINE.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the directory, once the new one is complete.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be written, and write nothing.")] = False,
    heads: Annotated[int | None, typer.Option(min=1, help="Write the first so many heads only.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL file of held-out chats: measure the heads before and after.")
    ] = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Write heads for a serving engine, and read them back by that engine's rules before they count."""
    from dataclasses import asdict

    from medusa.export import export as run

    if data is not None and (dry_run or to == "native"):
        raise ValueError("--data measures heads that were written for an engine; leave it out with --dry-run or native")
    done = run(checkpoint, to, out, overwrite, dry_run, dtype, heads)
    rows = [["heads", f"{done.num_heads}, {done.dtype}"]]
    rows += [[name, f"{size:,} bytes"] for name, size in done.files.items()]
    rows += [["used", done.uses], ["not used", done.ignores]]
    if done.check is not None:
        shares = " ".join(f"{share:.3f}" for share in done.check.same_guess)
        rows.append(["logits read back", f"differ by at most {done.check.difference:.1e} of the largest"])
        rows.append(["same first guess", f"{shares} (of each head, on random hidden states)"])
    for remark in done.remarks:
        note(remark)
    figures = {**asdict(done), "dry_run": dry_run}
    if data is not None:
        figures["top1"] = top1_before_and_after(checkpoint, to, done.out, done.num_heads, dtype, data)
        rows += [
            [f"top-1 {when}", " ".join(f"{share:.4f}" for share in shares) + f" (of each head, on {data})"]
            for when, shares in figures["top1"].items()
        ]
    title = f"would be written to {done.out}" if dry_run else f"written to {done.out}"
    show(as_json, figures, ["", ""], rows, title)


def top1_before_and_after(
    checkpoint: str, engine: str, out: str, num_heads: int, dtype: str, data: Path
) -> dict[str, list[float]]:
    """How often each head's likeliest token is right on held-out chats: ours, and as the engine reads them."""
    from medusa.engine_rules import read_as
    from medusa.export_check import model_of
    from medusa.train.evaluate import accuracy, judge_file

    model, tokenizer = load(checkpoint, dtype)
    exported = model_of(model.backbone, read_as(engine, Path(out), num_heads))
    before, after = (
        accuracy(judge_file(which, tokenizer, str(data), MAX_LENGTH, recorded=False)).top1[:num_heads]
        for which in (model, exported)
    )
    return {"before": before, "after": after}
