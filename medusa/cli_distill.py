"""`medusa distill`: the backbone's own answers to prompts, made here or by a server."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Dtype, Json, note, show

OUT = typer.Option(help="JSONL file of answers; continued if it exists. Failures stand beside it.")


def distill(
    prompts: Annotated[Path, typer.Option(help="JSONL file with `prompt`, `messages` or `conversations`.")],
    out: Annotated[Path, OUT],
    backbone: Annotated[str | None, typer.Option(help="Directory or hub id of the model that answers here.")] = None,
    server: Annotated[str | None, typer.Option(help="Or URL of an OpenAI-compatible server, .../v1.")] = None,
    model: Annotated[str | None, typer.Option(help="With --server: the model's name there.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="With --backbone: prompts answered together.")] = 16,
    turns: Annotated[int | None, typer.Option(min=1, help="Answer the first so many user turns; unsaid: all.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts only.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: answer part i of n, on this machine.")] = "1/1",
    record: Annotated[bool, typer.Option(help="With --backbone: record its hidden states for training.")] = False,
    top_logprobs: Annotated[int, typer.Option(min=0, help="Store the k likeliest tokens at every token.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="With --server: 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="With --server: nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="With --server: seed of the sampling.")] = None,
    keep_truncated: Annotated[bool, typer.Option(help="With --server: keep answers cut at the limit.")] = True,
    concurrency: Annotated[int, typer.Option(min=1, help="With --server: requests at a time.")] = 32,
    deadline: Annotated[float, typer.Option(min=0, help="With --server: seconds for one request.")] = 300.0,
    retries: Annotated[int, typer.Option(min=0, help="With --server: tries after the first.")] = 5,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Let the backbone answer prompts itself: the best text to train its heads on.

    The key of a server is read from MEDUSA_API_KEY or OPENAI_API_KEY.
    """
    from medusa.train.answer_file import failures_file
    from medusa.train.prompts import Shard, read_prompts

    part = Shard.parse(shard)
    if (backbone is None) == (server is None):
        raise ValueError("say who answers: either --backbone MODEL (here) or --server URL --model NAME")
    if server is None:
        from medusa.backbone import Backbone
        from medusa.loading import load_backbone, load_tokenizer
        from medusa.train.distill import distill as run

        assert backbone is not None
        tokenizer = load_tokenizer(backbone)
        found, report = read_prompts(prompts, tokenizer, limit, turns)
        found = [prompt for prompt in found if prompt.id in part]
        note(f"{prompts}: {report.summary()}; {len(found)} are in shard {shard}")
        target = Backbone(load_backbone(backbone, dtype))
        answered = run(target, tokenizer, found, out, max_new_tokens, batch_size, record, top_logprobs)
        wanted = sum(1 + len(prompt.follow_ups) for prompt in found)
    else:
        try:
            from medusa.train.server import Server, ServerSettings, distill_from_server
        except ModuleNotFoundError as error:
            raise ValueError("--server needs httpx: pip install 'medusa-heads[server]'") from error

        if model is None:
            raise ValueError(f"--server {server} needs --model, the model's name there (see {server}/models)")
        if record:
            raise ValueError("a server gives no hidden states; leave --record out, or answer with --backbone")
        found, report = read_prompts(prompts, None, limit, turns)
        found = [prompt for prompt in found if prompt.id in part]
        note(f"{prompts}: {report.summary()}; {len(found)} are in shard {shard}")
        settings = ServerSettings(model, max_new_tokens, temperature, top_p, seed, top_logprobs, keep_truncated)
        answered = distill_from_server(Server(server, concurrency, deadline, retries), settings, found, out)
        wanted = len(found)
    failures = failures_file(out)
    failed = len(failures.read_text(encoding="utf-8").splitlines()) if failures.exists() else 0
    if failed:
        note(f"{failed} failed; the reasons are in {failures}, and the same command tries them again")
    figures = {"prompts": len(found), "answered": answered, "failed": failed, "out": str(out)}
    columns = [str(wanted), str(answered), str(failed)]
    show(as_json, figures, ["wanted", "answered now", "failed"], [columns], str(out))
