"""`medusa export`: heads for a serving engine."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Checkpoint, Dtype, Json, note, show


def export(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option(help="native, reference, vllm, tgi or tensorrt-llm.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write; unsaid: CHECKPOINT-ENGINE.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the directory, once the new one is complete.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be written, and write nothing.")] = False,
    heads: Annotated[int | None, typer.Option(min=1, help="Write the first so many heads only.")] = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Write heads for a serving engine, and read them back by that engine's rules before they count."""
    from dataclasses import asdict

    from medusa.export import export as run

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
    title = f"would be written to {done.out}" if dry_run else f"written to {done.out}"
    show(as_json, {**asdict(done), "dry_run": dry_run}, ["", ""], rows, title)
