"""What a bench measures and sums up, with methods whose figures are known, and through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import save_tiny_chat_model
from console import medusa
from torch import Tensor

from medusa import MedusaConfig, MedusaModel
from medusa.inference.bench import Answer, Bench, Method, run_bench
from medusa.inference.bench_summary import category_rows, markdown_table, overall_rows, summarise
from medusa.inference.questions import Question, read_questions
from medusa.loading import load_backbone, load_tokenizer
from medusa.tree_search import SearchedTree

ASKED = [Question("1", "maths", ("one", "two")), Question("2", "poems", ("three",))]


def written(seconds: float, tokens: list[int], steps: int | None = None, accepted: list[int] | None = None) -> Method:
    """A method that always writes `tokens`, evenly in `seconds`."""

    def run(prompt: Tensor, new_tokens: int) -> Answer:
        arrivals = [seconds * (i + 1) / len(tokens) for i in range(len(tokens))]
        return Answer(tokens, arrivals, steps, accepted or [])

    return run


def bench_of(
    methods: dict[str, Method], questions: list[Question] = ASKED, repeats: int = 1, longest: int = 99
) -> Bench:
    def encode(history: list[tuple[str, str]], text: str) -> Tensor:
        return torch.zeros(1, 1 + len(history) * 10, dtype=torch.long)

    return run_bench(methods, ASKED, encode, str, 4, longest, repeats, lambda _: None)


def test_figures_are_as_defined() -> None:
    plain = written(2.0, [1, 2, 3, 4])
    heads = written(1.0, [1, 2, 3, 4], steps=2, accepted=[1, 0])
    other = written(4.0, [1, 2, 9, 4])
    found = summarise(bench_of({"other": other, "heads": heads, "generate": plain}))
    assert next(iter(found)) == "generate"
    assert {name: s.prompts for name, s in found.items()} == {"generate": 3, "other": 3, "heads": 3}
    assert found["heads"].tokens_per_step == 1.5  # 3 tokens after the prefill's own, in 2 passes
    assert found["heads"].tokens_per_second == 4.0
    assert found["heads"].ratio == 2.0
    assert found["heads"].ratio_quartiles == (2.0, 2.0)
    assert found["heads"].accepted_by_depth == [0.5]
    assert found["heads"].first_token_seconds == 0.25
    assert found["heads"].token_seconds == (0.25, 0.25)
    assert found["heads"].identical == 3
    assert found["heads"].ratio_by_category == {"maths": 2.0, "poems": 2.0}
    assert found["other"].identical == 0
    assert found["other"].ratio == 0.5
    assert found["generate"].tokens_per_step is None
    columns, rows = category_rows(found)
    assert columns == ["category", "other", "heads"]
    assert rows == [["maths", "0.50", "2.00 (1.50)"], ["poems", "0.50", "2.00 (1.50)"]]
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert overall_rows(found)[0][:2] == ["generate", "-"]


def test_methods_take_turns_and_see_the_same_prompts() -> None:
    seen: list[tuple[str, int]] = []

    def watched(name: str) -> Method:
        def run(prompt: Tensor, new_tokens: int) -> Answer:
            seen.append((name, prompt.shape[1]))
            return Answer([1], [1.0])

        return run

    bench_of({"generate": watched("generate"), "heads": watched("heads")}, repeats=2)
    measured = seen[2:]  # behind the warm-up
    pairs = [measured[i : i + 2] for i in range(0, len(measured), 2)]
    assert all({name for name, _ in pair} == {"generate", "heads"} for pair in pairs)
    assert all(pair[0][1] == pair[1][1] for pair in pairs)
    assert [pair[0][0] for pair in pairs] == ["generate", "generate", "heads", "heads", "heads", "generate"]
    assert [pair[0][1] for pair in pairs[:3]] == [1, 11, 1], "the second turn has the first one's answer before it"


def test_a_method_that_fails_is_reported_and_the_others_go_on() -> None:
    calls = 0

    def breaks(prompt: Tensor, new_tokens: int) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of luck")
        return Answer([1], [1.0])

    found = bench_of({"generate": written(1.0, [1]), "bad": breaks})
    assert found.failures == {"bad": "RuntimeError: out of luck"}
    assert {name: s.prompts for name, s in summarise(found).items()} == {"generate": 3, "bad": 1}

    def baseline(prompt: Tensor, new_tokens: int) -> Answer:
        raise RuntimeError("no baseline")

    with pytest.raises(RuntimeError, match="no baseline"):
        bench_of({"generate": baseline})


def test_ctrl_c_keeps_what_was_measured() -> None:
    calls = 0

    def stopped(prompt: Tensor, new_tokens: int) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return Answer([1], [1.0])

    found = bench_of({"generate": written(1.0, [1]), "heads": stopped})
    assert "Ctrl-C" in found.failures["(all)"]
    assert len(found.measurements) == 3


def test_ctrl_c_before_the_baselines_turn() -> None:
    """On the second question the other method comes first."""
    calls = 0

    def stopped(prompt: Tensor, new_tokens: int) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 4:  # the warm-up and two turns before
            raise KeyboardInterrupt
        return Answer([1], [1.0])

    found = bench_of({"generate": stopped, "heads": written(0.5, [1])})
    assert found.measurements[-1].method == "heads"
    assert {name: s.prompts for name, s in summarise(found).items()} == {"generate": 2, "heads": 2}


def test_long_prompts_are_left_out() -> None:
    assert summarise(bench_of({"generate": written(1.0, [1])}, longest=5))["generate"].prompts == 2


def test_question_files(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "category": "writing", "turns": ["c"]},
        {"id": "x", "prompt": "d"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_questions(file) == [
        Question("81", "writing", ("a", "b")),
        Question("82", "writing", ("c",)),
        Question("x", "all", ("d",)),
    ]
    file.write_text('\ufeff{"prompt": "a\u2028b\u0085c"}\n')
    assert read_questions(file) == [Question("1", "all", ("a\u2028b\u0085c",))]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [q.id for q in read_questions(file, per_category=1)] == ["81", "x"]
    assert read_questions(file, turns=1)[0].turns == ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no questions"),
        ("{}\n", "line 1 holds no question: `turns`"),
        ('{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
        ('{"turns": []}\n', "line 1 holds no question"),
        ('{"turns": [""]}\n', "line 1 holds no question"),
        ("[1]\n", "line 1 holds no question"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "id '1' stands twice in category 'all'"),
    ],
)
def test_foreign_question_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(file)
    with pytest.raises(ValueError, match=r"cannot read the questions in .*missing"):
        read_questions(tmp_path / "missing")


def test_the_command(tmp_path: Path) -> None:
    path = save_tiny_chat_model(tmp_path / "model")
    model = MedusaModel.attach(load_backbone(str(path)), MedusaConfig(num_heads=2))
    model.searched_tree = SearchedTree(((0,), (0, 0)), (0.5, 0.2), 100)
    model.save_pretrained(tmp_path / "heads", load_tokenizer(str(path)))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"category": c, "turns": [c, "and?"]}) + "\n" for c in ("maths", "poems")))
    names = "prompt-lookup,heads,dynamic,lookup,combined,draft"
    given = ("--questions", str(questions), "--max-new-tokens", "6", "--out", str(tmp_path / "out"), "--json")
    figures = json.loads(medusa("bench", str(tmp_path / "heads"), "--methods", names, "--draft", str(path), *given))
    assert list(figures["methods"]) == ["generate", *names.split(",")]
    for method in figures["methods"].values():
        assert method["prompts"] == method["identical"] == 4
    assert figures["methods"]["heads"]["tokens_per_step"] >= 1
    assert figures["questions"] == "questions.jsonl"
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["failures"] == {}
    assert "| maths |" in (tmp_path / "out" / "bench.md").read_text()
    assert "combined" in (tmp_path / "out" / "report.html").read_text()
