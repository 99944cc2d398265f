"""`medusa push`: a checkpoint on the hub."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Json, show


def push(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.")],
    repository: Annotated[str | None, typer.Argument(help="USER/NAME on the hub.")] = None,
    private: Annotated[bool, typer.Option(help="A repository that others do not see, where it is new.")] = False,
    license_: Annotated[str | None, typer.Option("--license", help="For the card; the backbone's applies.")] = None,
    bench: Annotated[Path | None, typer.Option(help="Directory that `medusa bench --out` wrote, for the card.")] = None,
    dry_run: Annotated[
        Path | None, typer.Option(help="Only write what would be sent into this new directory, to use it from there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload heads with a model card, a picture of their tree, and code for `generate(custom_generate=...)`."""
    from .checkpoint import atomic_directory
    from .hub import prepare
    from .hub import push as send

    if dry_run is not None:
        if dry_run.exists():
            raise ValueError(f"--dry-run {dry_run} is there already; name a directory that is not, or remove it")
        where = repository or os.path.abspath(dry_run)
        with atomic_directory(dry_run) as work:
            prepare(checkpoint, work, where, license_, bench)
    elif repository is None:
        raise ValueError("say where to: medusa push CHECKPOINT USER/NAME, or --dry-run DIRECTORY to send nothing")
    else:
        where = send(checkpoint, repository, private, license_, bench)
    show(as_json, {"repository": where}, ["written" if dry_run else "uploaded"], [[where]], str(checkpoint))
