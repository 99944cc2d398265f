"""What a bench found, as one HTML page that needs nothing else: no script, no network."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from .bench import BASELINE, Bench
from .bench_summary import OVERALL_COLUMNS, MethodSummary, overall_rows

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html_report(bench: Bench, summaries: dict[str, MethodSummary], facts: dict[str, Any]) -> str:
    """The page: all methods, ratios by category, acceptance by depth, what failed, and the machine."""
    depths = {
        name: {f"depth {depth}": share for depth, share in enumerate(summary.accepted_by_depth, start=1)}
        for name, summary in summaries.items()
        if summary.accepted_by_depth
    }
    others = {name: summary.ratio_by_category for name, summary in summaries.items() if name != BASELINE}
    categories = {
        category: {name: ratios[category] for name, ratios in others.items() if category in ratios}
        for category in summaries[BASELINE].ratio_by_category
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        overall_columns=OVERALL_COLUMNS,
        overall=overall_rows(summaries),
        categories=categories,
        top_ratio=max([1.0, *(ratio for ratios in categories.values() for ratio in ratios.values())]),
        depths=depths,
        failures=bench.failures,
        facts=facts,
    )
