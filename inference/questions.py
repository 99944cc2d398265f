"""Question files to measure on: Spec-Bench, MT-bench, or any JSONL with prompts."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """What is asked, one turn after the other."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(file: Path, per_category: int | None = None, turns: int | None = None) -> list[Question]:
    """Read a JSONL file whose rows hold `turns` or `prompt`, and perhaps `category` and `question_id` or `id`.

    Args:
        file: where from.
        per_category: take the first so many of each category.
        turns: ask the first so many turns of each.

    Raises:
        ValueError: the file is missing, a row is no question (its line is named), an id stands twice, or there is none.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # texts may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the questions in {file}: {error}") from error
    found: dict[str, list[Question]] = defaultdict(list)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question = _question(line, f"{file}, line {number}", number)
            of_category = found[question.category]
            if per_category is None or len(of_category) < per_category:
                of_category.append(Question(question.id, question.category, question.turns[:turns]))
    for category, questions in found.items():
        ids = [question.id for question in questions]
        if len(set(ids)) < len(ids):
            double = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"{file}: id {double!r} stands twice in category {category!r}; give each question its own")
    if not found:
        raise ValueError(f"{file} holds no questions; give JSONL with `turns` or `prompt` in every row")
    return [question for questions in found.values() for question in questions]


def _question(line: str, where: str, number: int) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); a question file has one JSON object a line") from error
    asked = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
    turns = [asked] if isinstance(asked, str) else asked
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} holds no question: `turns` must be a list of texts, or `prompt` a text")
    return Question(str(row.get("question_id", row.get("id", number))), str(row.get("category", "all")), tuple(turns))
