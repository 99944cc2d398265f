"""The commands that answer: `generate` and `chat`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .cli_common import Checkpoint, Dtype, Json, MaxNewTokens, PackWeights, load, make_decoder, note, show

if TYPE_CHECKING:
    from .cli_answers import Speaker

System = Annotated[str | None, typer.Option(help="System message, where a chat has none of its own.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; above, tokens are drawn.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the likeliest tokens of this probability together; unsaid: the model's.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens; unsaid: the model's.")]
Seed = Annotated[int | None, typer.Option(help="Draw the same again; the same tree must draw it, so give --nodes.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Size of the searched tree; unsaid: the fastest one here.")]
Acceptance = Annotated[
    str, typer.Option(help="exact: as the backbone alone would write. typical: more guesses, another distribution.")
]
Epsilon = Annotated[
    float | None, typer.Option(help="With --acceptance typical: how unlikely a guess may be; unsaid: 0.09.")
]
Guesses = Annotated[
    str, typer.Option("--proposal", help="How heads choose guesses when tokens are drawn: auto, top_k, sampled, mixed.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop after this text; can be given several times.")]
ShowAccepted = Annotated[bool, typer.Option("--show-accepted", help="Mark what the heads guessed in green.")]


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="What to ask; unsaid: what is piped in.")] = None,
    source: Annotated[
        Path | None, typer.Option("--input", help="JSONL file with `prompt`, `messages` or `conversations`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", help="With --input: JSONL file of answers; continued if it exists.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="With --input: prompts answered together.")] = 8,
    max_new_tokens: MaxNewTokens = 256,
    system: System = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    acceptance: Acceptance = "exact",
    epsilon: Epsilon = None,
    proposal: Guesses = "auto",
    stop: Stop = None,
    show_accepted: ShowAccepted = False,
    nodes: Nodes = None,
    pack_weights: PackWeights = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming, or a file of prompts in batches."""
    if (source is None) != (out is None):
        raise ValueError("--input FILE.jsonl and --output FILE.jsonl go together: prompts and where to put the answers")
    if source is not None and prompt is not None:
        raise ValueError("both --prompt and --input are given; give one of them")
    text = (prompt if prompt is not None else _piped()) if source is None else ""
    options = _options(temperature, top_p, top_k, stop)
    speaker = _speaker(
        checkpoint, dtype, pack_weights, nodes, max_new_tokens, system, options, seed, acceptance, epsilon, proposal
    )
    if source is not None and out is not None:
        _answer_file(speaker, checkpoint, source, out, batch_size, as_json)
    else:
        _answer_one(speaker, text, show_accepted, as_json)


def chat(
    checkpoint: Checkpoint,
    max_new_tokens: MaxNewTokens = 1024,
    system: System = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    acceptance: Acceptance = "exact",
    epsilon: Epsilon = None,
    proposal: Guesses = "auto",
    stop: Stop = None,
    show_accepted: ShowAccepted = False,
    nodes: Nodes = None,
    pack_weights: PackWeights = None,
    dtype: Dtype = "auto",
) -> None:
    """Chat in the terminal, with figures after each answer."""
    options = _options(temperature, top_p, top_k, stop)
    speaker = _speaker(
        checkpoint,
        dtype,
        pack_weights,
        nodes,
        max_new_tokens,
        system,
        options,
        seed,
        acceptance,
        epsilon,
        proposal,
        turns=True,
    )
    from .cli_answers import converse

    converse(speaker, show_accepted)


def _speaker(
    checkpoint: str,
    dtype: str,
    pack_weights: bool | None,
    nodes: int | None,
    max_new_tokens: int,
    system: str | None,
    options: dict[str, Any],
    seed: int | None,
    acceptance: str,
    epsilon: float | None,
    proposal: str,
    turns: bool = False,
) -> "Speaker":
    """Load a checkpoint to answer with; `turns` says whether it must tell turns apart."""
    from medusa.inference import Typical
    from medusa.inference.draws import dice

    from .cli_answers import Speaker, give_template

    if epsilon is not None and acceptance != "typical":
        raise ValueError(f"--epsilon is for --acceptance typical, this is --acceptance {acceptance}")
    rule: Any = acceptance if epsilon is None else Typical(epsilon)
    model, tokenizer = load(checkpoint, dtype)
    if turns and tokenizer.chat_template is None:
        raise ValueError(
            "this tokenizer has no chat template, so turns of a chat cannot be told apart; "
            "use `medusa generate`, which continues plain text"
        )
    give_template(tokenizer)
    decoder = make_decoder(model, pack_weights, nodes, acceptance=rule, proposal=proposal)
    return Speaker(decoder, tokenizer, max_new_tokens, options, dice(None, seed, decoder.device), system)


def _options(temperature: float, top_p: float | None, top_k: int | None, stop: list[str] | None) -> dict[str, Any]:
    """Options of `generate` as the command line gives them."""
    drawn = {name: value for name, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    if drawn and temperature == 0:
        name = next(iter(drawn)).replace("_", "-")
        raise ValueError(f"--{name} is for drawn tokens, and --temperature 0 draws none; give --temperature above 0")
    options = {"do_sample": True, "temperature": temperature, **drawn} if temperature else {"do_sample": False}
    return options | ({"stop_strings": stop} if stop else {})


def _piped() -> str:
    """The text that is piped in."""
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise ValueError("no prompt: give --prompt TEXT, pipe a text in, or give --input FILE.jsonl")
    return text


def _answer_one(speaker: "Speaker", text: str, show_accepted: bool, as_json: bool) -> None:
    from medusa.inference import DecodingStats

    from .cli_answers import Piece, figures_of, say, summary, text_of

    stats = DecodingStats()
    pieces = speaker.stream([{"role": "user", "content": text}], stats)
    if not as_json:
        say(Console(), pieces, show_accepted, [])
        note(summary(stats))
        return
    said: list[Piece] = list(pieces)
    figures = {"text": text_of(said), **figures_of(stats), "tree_nodes": speaker.decoder.proposer.sizes[-1]}
    if show_accepted:
        figures["pieces"] = [{"text": piece.text, "accepted": piece.accepted} for piece in said if piece.text]
    print(json.dumps(figures))


def _answer_file(speaker: "Speaker", checkpoint: str, source: Path, out: Path, batch_size: int, as_json: bool) -> None:
    from .cli_answers import answer_file

    figures = answer_file(speaker, checkpoint, source, out, batch_size)
    columns = ["prompts", "answered now", "new tokens"]
    show(as_json, figures, columns, [[str(value) for value in figures.values()][:3]], str(out))
