import json
from pathlib import Path

import pytest
from chatml import byte_tokenizer

from medusa.train.chat import RowError, messages_of
from medusa.train.rows import load_rows
from medusa.train.supervision import IGNORE


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_mixed_file_keeps_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    """Report R3, without Alpaca rows."""
    file = write(
        tmp_path / "chats.jsonl",
        {"conversations": [{"from": "human", "value": "Say HELLO"}, {"from": "gpt", "value": "HELLO World"}]},
        {
            "conversations": [
                {"from": "gpt", "value": "welcome"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ]
        },
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "b"},
            ]
        },
        {"messages": []},
        "{broken",
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"words": "neither"},
        {"messages": [{"role": "robot", "content": "x"}]},
        [1, 2],
    )
    tokenizer = byte_tokenizer()
    rows, report = load_rows(file, tokenizer, max_length=1000)
    learned = [tokenizer.decode([label for label in row.labels if label != IGNORE]) for row in rows]
    assert learned == ["HELLO World<|im_end|>", "a<|im_end|>", "b<|im_end|>"]
    assert "welcome" not in tokenizer.decode(rows[1].input_ids)
    assert [place for place, _ in report.dropped] == [f"line {line}" for line in range(4, 10)]
    reasons = dict(report.dropped)
    assert "'messages'" in reasons["line 4"]
    assert "not JSON" in reasons["line 5"]
    assert "no assistant turn" in reasons["line 6"]
    assert "words" in reasons["line 7"]
    assert "'robot'" in reasons["line 8"]
    assert report.summary().startswith("3 rows kept, 6 dropped (line 4:")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no row to learn from"),
        ("{}\n", "neither 'messages' nor 'conversations'"),
        ("nonsense\n", "line 1: not JSON"),
    ],
)
def test_file_without_a_usable_row(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows(file, byte_tokenizer(), 100)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data file"):
        load_rows(tmp_path / "absent.jsonl", byte_tokenizer(), 100)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_rows(tmp_path / "binary.jsonl", byte_tokenizer(), 100)


def test_answer_beyond_the_cut_is_dropped_with_a_reason(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "q" * 50}, {"role": "assistant", "content": "a"}]}
    short = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 50}]}
    rows, report = load_rows(write(tmp_path / "x.jsonl", long, short), byte_tokenizer(), max_length=40)
    assert len(rows[0].input_ids) == len(rows[0].labels) == 40
    assert report.dropped[0][0] == "line 1"
    assert "first 40 tokens" in report.dropped[0][1]


def test_content_is_never_altered() -> None:
    messages = messages_of({"conversations": [{"from": "human", "value": "  A b\n"}, {"from": "gpt", "value": "\tC "}]})
    assert [message["content"] for message in messages] == ["  A b\n", "\tC "]


def test_row_that_lacks_a_field() -> None:
    with pytest.raises(RowError, match="lacks 'from' or 'value'"):
        messages_of({"conversations": [{"from": "human"}]})
    with pytest.raises(RowError, match="must be text"):
        messages_of({"messages": [{"role": "user", "content": ["parts"]}]})


@pytest.mark.parametrize(
    ("row", "asked", "answered"),
    [
        ({"instruction": "Say HELLO", "input": "", "output": "HELLO"}, "Say HELLO", "HELLO"),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "Add\n\n1 2", "3"),
        ({"prompt": "Q", "completion": " A"}, "Q", " A"),
    ],
)
def test_alpaca_and_completion_rows(row: dict[str, str], asked: str, answered: str) -> None:
    assert [message["content"] for message in messages_of(row)] == [asked, answered]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "q", "completion": "a"}\n')
    assert load_rows(file, byte_tokenizer(), 100)[1].kept == 1
