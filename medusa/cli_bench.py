"""`medusa bench`: ways to decode, side by side."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_common import Checkpoint, Dtype, Json, MaxNewTokens, load, note, show

if TYPE_CHECKING:
    from medusa.inference import MedusaDecoder
    from medusa.inference.bench import Method
    from medusa.model import MedusaModel

THEIRS = ("generate", "prompt-lookup", "static")
"""Of transformers; `generate` is what all others are compared with, and `static` compiles for minutes."""
OURS = ("heads", "dynamic", "lookup", "combined", "draft")
METHODS = (*THEIRS, *OURS)
USUAL = "generate,prompt-lookup,heads"


def bench(
    checkpoint: Checkpoint,
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(METHODS)}; or all of them: all.")
    ] = USUAL,
    draft: Annotated[str | None, typer.Option(help="For the method draft: a smaller model.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help=f"Also measure {', '.join(OURS)} compiled, which takes minutes.")
    ] = False,
    questions: Annotated[
        Path | None,
        typer.Option(help="JSONL with `turns` or `prompt`, and `category`; unsaid: a dozen built-in prompts."),
    ] = None,
    per_category: Annotated[
        int | None, typer.Option(min=1, help="The first so many questions of each category.")
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="The first so many turns of each question.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    longest: Annotated[int, typer.Option(min=1, help="Leave out prompts of more tokens.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Ask everything so often.")] = 1,
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write bench.json, bench.md, report.html there.")] = None,
    as_json: Json = False,
) -> None:
    """Compare ways to decode greedily: tokens per step, tokens per second, latencies, by category of questions."""
    from medusa.inference.bench import run_bench
    from medusa.inference.bench_html import html_report
    from medusa.inference.bench_summary import (
        OVERALL_COLUMNS,
        category_rows,
        overall_rows,
        summarise,
        to_json,
        write_report,
    )
    from medusa.inference.questions import Question, read_questions
    from medusa.inference.sample_prompts import SAMPLE_PROMPTS
    from medusa.progress import progress_bar

    from .cli_answers import Speaker, give_template

    names = _names(methods, draft)
    asked = (
        [Question(str(i), "built in", (text,)) for i, text in enumerate(SAMPLE_PROMPTS)]
        if questions is None
        else read_questions(questions, per_category, turns)
    )
    model, tokenizer = load(checkpoint, dtype)
    give_template(tokenizer)
    decoder, ways = _methods(model, tokenizer, names, draft, compiled)
    speaker = Speaker(decoder, tokenizer, max_new_tokens, {})

    def encode(history: list[tuple[str, str]], text: str) -> Any:
        said = [[("user", question), ("assistant", answer)] for question, answer in history]
        messages = [{"role": role, "content": content} for pair in said for role, content in pair]
        return speaker.ids([*messages, {"role": "user", "content": text}])

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    with progress_bar("questions", len(asked) * repeats) as advance:
        found = run_bench(ways, asked, encode, decode, max_new_tokens, longest, repeats, advance)
    for name, reason in found.failures.items():
        note(f"{name}: {reason}")
    summaries = summarise(found)
    if not summaries:
        raise ValueError(
            f"nothing was measured: stopped too early, or no prompt has --longest {longest} tokens or fewer"
        )
    facts = _facts(model, checkpoint, questions, decoder)
    if out is not None:
        write_report(out, found, summaries, facts)
        (out / "report.html").write_text(html_report(found, summaries, facts), encoding="utf-8")
    if as_json:
        print(json.dumps(to_json(found, summaries, facts)))
        return
    title = f"{len(asked)} questions, {facts['dtype']}, {max_new_tokens} tokens at most"
    show(False, {}, OVERALL_COLUMNS, overall_rows(summaries), title)
    show(False, {}, *category_rows(summaries), "ratio to generate (tokens per step) by category")


def _names(methods: str, draft: str | None) -> list[str]:
    known = [name for name in METHODS if name != "draft" or draft is not None]
    names = known if methods == "all" else [name.strip() for name in methods.split(",")]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods names {unknown[0]!r}; allowed: all, {', '.join(METHODS)}")
    if "draft" in names and draft is None:
        raise ValueError("--methods names draft; say which smaller model drafts: --draft PATH_OR_HUB_ID")
    return [METHODS[0], *(name for name in names if name != METHODS[0])]


def _methods(
    model: "MedusaModel", tokenizer: Any, names: list[str], draft: str | None, compiled: bool
) -> tuple["MedusaDecoder", dict[str, "Method"]]:
    """The methods that were asked for, and the decoder with the tree that is fastest here."""
    from medusa.inference import MedusaDecoder
    from medusa.inference.bench import decoder_method, generate_method

    theirs: dict[str, dict[str, Any]] = {
        "generate": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "static": {"cache_implementation": "static"},
    }
    fastest = MedusaDecoder(model, tree="auto", pack_weights="auto")
    ours = _ours(model, tokenizer, names, draft, fastest)
    ways: dict[str, Method] = {}
    for name in names:
        if name in theirs:
            ways[name] = generate_method(model.model, theirs[name])
        elif name in ours:
            ways[name] = decoder_method(MedusaDecoder(model, **ours[name]))
            if compiled:
                decoder = MedusaDecoder(model, **ours[name], compile=True)
                decoder.warm_up()
                ways[f"{name}, compiled"] = decoder_method(decoder)
    return fastest, ways


def _ours(
    model: "MedusaModel", tokenizer: Any, names: list[str], draft: str | None, fastest: "MedusaDecoder"
) -> dict[str, dict[str, Any]]:
    """What makes a decoder of each of OURS; steps are timed and models loaded once for all."""
    from medusa.inference import DraftModel, DynamicTree, HeadsAndLookup, Lookup, MedusaDecoder, StepSizes
    from medusa.loading import load_backbone, load_tokenizer

    packed = fastest.backbone is not model.backbone
    made: dict[str, dict[str, Any]] = {"heads": {"tree": fastest.tree, "pack_weights": packed}}
    lookup = Lookup()
    searched = model.searched_tree is not None and model.searched_tree.paths
    if searched and not {"dynamic", "lookup", "combined"}.isdisjoint(names):
        timed = MedusaDecoder(model, tree="dynamic", pack_weights="auto")
        packed = timed.backbone is not model.backbone
        assert isinstance(timed.tree, DynamicTree)
        made["dynamic"] = {"tree": timed.tree, "pack_weights": packed}
        lookup = Lookup(sizes=StepSizes(timed.tree.sizes, timed.tree.seconds, timed.tree.tokens_per_second))
        made["combined"] = {"proposer": HeadsAndLookup(model, lookup), "pack_weights": packed}
    made["lookup"] = {"proposer": lookup, "pack_weights": packed}
    if draft is not None:
        smaller = load_backbone(draft, model.backbone.lm_weight.dtype)
        drafting = DraftModel(smaller, num_drafts="auto", tokenizers=(tokenizer, load_tokenizer(draft)))
        made["draft"] = {"proposer": drafting, "pack_weights": packed}
    for name in names:
        if name in OURS and name not in made:
            note(f"{name}: left out, since no tree was searched for these heads; `medusa tree CHECKPOINT --data FILE`")
    return made


def _facts(model: "MedusaModel", checkpoint: str, questions: Path | None, decoder: "MedusaDecoder") -> dict[str, Any]:
    """What the figures depend on."""
    import platform

    import torch
    import transformers

    return {
        "checkpoint": checkpoint,
        "backbone": model.model.config._name_or_path,
        "questions": "built in" if questions is None else questions.name,
        "dtype": str(model.backbone.lm_weight.dtype).removeprefix("torch."),
        "tree_nodes": decoder.proposer.sizes[-1],
        "weights_packed": decoder.backbone is not model.backbone,
        "device": str(decoder.device) if decoder.device.type == "cpu" else torch.cuda.get_device_name(decoder.device),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
