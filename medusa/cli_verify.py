"""`medusa verify`: the decoder against plain `generate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .cli_common import Checkpoint, Dtype, Json, MaxNewTokens, PackWeights, load, make_decoder, note, show

if TYPE_CHECKING:
    from medusa.inference.equivalence import Divergence


def verify(
    checkpoint: Checkpoint,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file with `prompt`, `messages` or `conversations`; unsaid: a dozen built-in prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts only.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Size of the searched tree; unsaid: the fastest one here.")
    ] = None,
    pack_weights: PackWeights = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Compare greedy answers with those of plain `generate`; status 1 if rounding does not explain a difference."""
    from dataclasses import asdict

    from medusa.inference.benchmark import compare
    from medusa.inference.equivalence import explain
    from medusa.inference.refusals import check_prompt
    from medusa.inference.sample_prompts import SAMPLE_PROMPTS
    from medusa.progress import progress_bar
    from medusa.train.prompts import read_prompts

    from .cli_answers import Speaker, give_template

    model, tokenizer = load(checkpoint, dtype)
    give_template(tokenizer)
    if prompts is None:
        chats = [(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(SAMPLE_PROMPTS[:limit])]
    else:
        found, report = read_prompts(prompts, tokenizer, limit)
        note(f"{prompts}: {report.summary()}")
        chats = [(prompt.id, prompt.messages) for prompt in found]
    decoder = make_decoder(model, pack_weights, nodes)
    speaker = Speaker(decoder, tokenizer, max_new_tokens, {})
    ids = [speaker.ids(messages) for _, messages in chats]
    for (name, _), prompt in zip(chats, ids, strict=True):
        check_prompt(decoder.backbone, prompt[0], f"prompt {name}: ")
    with progress_bar("decoding both ways", len(ids)) as advance:
        runs = compare(decoder, ids, max_new_tokens, advance)
    found_out = zip(chats, runs.comparisons, strict=True)
    explained = ((name, explain(model.backbone, run.prompt, run.plain, run.medusa)) for (name, _), run in found_out)
    differences = [(name, difference) for name, difference in explained if difference is not None]
    unexplained = sum(not difference.explained for _, difference in differences)
    figures = {
        "prompts": len(ids),
        "identical": runs.identical,
        "explained_by_rounding": len(differences) - unexplained,
        "unexplained": unexplained,
        "tokens_per_step": round(runs.tokens_per_step, 3),
        "tree_nodes": decoder.proposer.sizes[-1],
        "weights_packed": decoder.backbone is not model.backbone,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "divergences": [
            {"id": name, "explained": difference.explained, **asdict(difference)} for name, difference in differences
        ],
    }
    rows = [_row(name, difference, tokenizer) for name, difference in differences]
    columns = ["prompt", "token", "generate", "decoder", "rank", "margin", "rounding", "explained by rounding"]
    if as_json or rows:
        show(as_json, figures, columns, rows, "where answers part")
    if not as_json:
        verdict = (
            f"{len(ids)} prompts, {figures['dtype']}, {decoder.proposer.sizes[-1]} nodes: {runs.identical} answers "
            f"identical, {len(differences) - unexplained} part where rounding decides, {unexplained} unexplained"
        )
        Console().print(verdict, highlight=False)
    if unexplained:
        raise typer.Exit(1)


def _row(name: str, difference: "Divergence", tokenizer: Any) -> list[str]:
    """One line of the table; texts as Python writes them, so that spaces and line ends can be seen."""
    tokens = (difference.plain_token, difference.medusa_token)
    texts = ["(ended)" if token is None else repr(tokenizer.decode([token])) for token in tokens]
    choice = difference.choice
    measured = ["", "", ""] if choice is None else [str(choice.rank), f"{choice.margin:.3g}", f"{choice.rounding:.3g}"]
    verdict = "yes" if difference.explained else f"no, from token {difference.unexplained} on"
    return [escape(cell) for cell in (name, str(difference.place), *texts, *measured, verdict)]
