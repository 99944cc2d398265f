"""Sum up what a bench measured, for people and for machines."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .bench import BASELINE, Answer, Bench, Measurement


@dataclass(frozen=True)
class MethodSummary:
    """One method over all prompts."""

    prompts: int
    tokens_per_step: float | None
    """Tokens emitted by verify passes / verify passes, roots included; None where there are no steps."""
    tokens_per_second: float
    """Median over the prompts, prefill included."""
    ratio: float
    """Median over the prompts of tokens per second / those of the baseline on the same prompt."""
    ratio_quartiles: tuple[float, float]
    first_token_seconds: float
    """Median."""
    token_seconds: tuple[float, float]
    """Time from one token to the next: median and 95th percentile over all tokens."""
    accepted_by_depth: list[float]
    """Share of the steps that accept at least 1, 2, ... candidates."""
    identical: int
    """How many answers equal the baseline's, token for token."""
    ratio_by_category: dict[str, float]
    tokens_per_step_by_category: dict[str, float]


def summarise(bench: Bench) -> dict[str, MethodSummary]:
    """Every method that measured anything, the baseline first; prompts that it never came to are left out."""
    baseline = {_key(m): m.answer for m in bench.measurements if m.method == BASELINE}
    by_method: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in bench.measurements:
        if _key(measurement) in baseline:
            by_method[measurement.method].append(measurement)
    order = sorted(by_method, key=lambda name: name != BASELINE)
    return {name: _summary(by_method[name], baseline) for name in order}


def _key(measurement: Measurement) -> tuple[str, str, int, int]:
    return measurement.question.category, measurement.question.id, measurement.turn, measurement.repeat


def _summary(measurements: list[Measurement], baseline: dict[tuple[str, str, int, int], Answer]) -> MethodSummary:
    ratios: dict[str, list[float]] = defaultdict(list)
    of_category: dict[str, list[Answer]] = defaultdict(list)
    for m in measurements:
        ratios[m.question.category].append(_speed(m.answer) / _speed(baseline[_key(m)]))
        of_category[m.question.category].append(m.answer)
    answers = [m.answer for m in measurements]
    every = [ratio for own in ratios.values() for ratio in own]
    quartiles = quantiles(every, n=4) if len(every) > 1 else every * 3
    gaps = sorted(b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False))
    accepted = [count for answer in answers for count in answer.accepted]
    per_step = {category: _tokens_per_step(own) for category, own in of_category.items()}
    return MethodSummary(
        prompts=len(answers),
        tokens_per_step=_tokens_per_step(answers),
        tokens_per_second=median(map(_speed, answers)),
        ratio=median(every),
        ratio_quartiles=(quartiles[0], quartiles[2]),
        first_token_seconds=median(answer.arrivals[0] for answer in answers),
        token_seconds=(median(gaps), gaps[int(0.95 * (len(gaps) - 1))]) if gaps else (0.0, 0.0),
        accepted_by_depth=[
            sum(count >= depth for count in accepted) / len(accepted)
            for depth in range(1, max(accepted, default=0) + 1)
        ],
        identical=sum(m.answer.tokens == baseline[_key(m)].tokens for m in measurements),
        ratio_by_category={category: median(own) for category, own in ratios.items()},
        tokens_per_step_by_category={category: value for category, value in per_step.items() if value is not None},
    )


def _speed(answer: Answer) -> float:
    return len(answer.tokens) / answer.seconds


def _tokens_per_step(answers: list[Answer]) -> float | None:
    steps = sum(answer.steps or 0 for answer in answers)
    return sum(len(answer.tokens) - 1 for answer in answers if answer.steps) / steps if steps else None


def to_json(bench: Bench, summaries: dict[str, MethodSummary], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything a program could want, single answers' figures included."""
    return {
        **facts,
        "methods": {name: asdict(summary) for name, summary in summaries.items()},
        "failures": bench.failures,
        "answers": [
            {
                "method": m.method,
                "category": m.question.category,
                "question": m.question.id,
                "turn": m.turn,
                "repeat": m.repeat,
                "tokens": len(m.answer.tokens),
                "seconds": round(m.answer.seconds, 4),
                "first_token_seconds": round(m.answer.arrivals[0], 4),
                "steps": m.answer.steps,
            }
            for m in bench.measurements
        ],
    }


OVERALL_COLUMNS = ["method", "tokens/step", "tokens/s", "ratio (quartiles)", "first, p50, p95 ms", "identical"]


def overall_rows(summaries: dict[str, MethodSummary]) -> list[list[str]]:
    """Rows for people, under OVERALL_COLUMNS: time to the first token, then from one token to the next."""
    return [
        [
            name,
            "-" if s.tokens_per_step is None else f"{s.tokens_per_step:.2f}",
            f"{s.tokens_per_second:.1f}",
            f"{s.ratio:.2f} ({s.ratio_quartiles[0]:.2f}-{s.ratio_quartiles[1]:.2f})",
            ", ".join(f"{1000 * seconds:.0f}" for seconds in (s.first_token_seconds, *s.token_seconds)),
            f"{s.identical} of {s.prompts}",
        ]
        for name, s in summaries.items()
    ]


def category_rows(summaries: dict[str, MethodSummary]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the ratios by category: a row for each category, a column for each method."""
    names = [name for name in summaries if name != BASELINE]
    categories = list(summaries[BASELINE].ratio_by_category)
    rows = [
        [
            category,
            *(
                f"{summaries[name].ratio_by_category[category]:.2f}"
                + (
                    f" ({summaries[name].tokens_per_step_by_category[category]:.2f})"
                    if category in summaries[name].tokens_per_step_by_category
                    else ""
                )
                if category in summaries[name].ratio_by_category
                else "-"
                for name in names
            ),
        ]
        for category in categories
    ]
    return ["category", *names], rows


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(directory: Path, bench: Bench, summaries: dict[str, MethodSummary], facts: dict[str, Any]) -> None:
    """Write bench.json and bench.md."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.json").write_text(json.dumps(to_json(bench, summaries, facts), indent=2) + "\n")
    said = ", ".join(f"{key} {value}" for key, value in facts.items())
    tables = [markdown_table(OVERALL_COLUMNS, overall_rows(summaries)), markdown_table(*category_rows(summaries))]
    (directory / "bench.md").write_text("\n\n".join([*tables, said]) + "\n")
