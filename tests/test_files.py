"""Where rows of data come from: every kind of file gives the same rows, and what is broken is named."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from chatml import CHATML, TAGGED, byte_tokenizer
from datasets import Dataset

from medusa.train.chat import RowError, messages_of
from medusa.train.files import read_rows
from medusa.train.rows import coverage, load_rows
from medusa.train.supervision import IGNORE

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i} é"}]} for i in range(3)
]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    table = Dataset.from_list([{name: row.get(name) for name in {k: 0 for r in rows for k in r}} for row in rows])
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".parquet":
        table.to_parquet(str(file))
    elif file.suffix == ".csv":
        table.to_csv(str(file), index=False)
    else:
        table.save_to_disk(str(file.parent / "saved"))
        (arrow,) = (file.parent / "saved").glob("*.arrow")
        arrow.rename(file)
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [row for _, row in read_rows(write(tmp_path / f"x{suffix}", CHATS))]
    assert rows == CHATS
    loaded, report = load_rows(tmp_path / f"x{suffix}", byte_tokenizer(), 512)
    assert (report.kept, report.dropped) == (3, [])
    assert len(loaded) == 3


def test_csv(tmp_path: Path) -> None:
    rows = [{"prompt": "q, 1", "completion": 'a "1"\nb'}, {"prompt": "q2", "completion": "a2"}]
    assert [row for _, row in read_rows(write(tmp_path / "x.csv", rows))] == rows


def test_fields_that_a_table_lacks_in_a_row_are_not_there(tmp_path: Path) -> None:
    """Formats are told apart by row, also where one table holds several."""
    rows = [{"prompt": "q", "completion": "a"}, {"text": "plain"}]
    assert [row for _, row in read_rows(write(tmp_path / "x.parquet", rows))] == rows


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n "])
def test_the_start_of_an_array(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "x.json").write_bytes(start + json.dumps(CHATS).encode())
    assert list(read_rows(tmp_path / "x.json")) == [(f"row {i}", chat) for i, chat in enumerate(CHATS, start=1)]


def test_an_array_that_breaks_off_gives_its_whole_rows(tmp_path: Path) -> None:
    """Report R13: a download that was cut."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps(CHATS)[:-30])
    *whole, (place, error) = read_rows(file)
    assert [row for _, row in whole] == CHATS[:2]
    assert place == "row 3"
    assert isinstance(error, RowError)
    _, report = load_rows(file, byte_tokenizer(), 512)
    assert report.kept == 2
    assert "breaks off behind row 2" in report.summary()
    with pytest.raises(ValueError, match=r"row 3: the array breaks off behind row 2.*on_error"):
        load_rows(file, byte_tokenizer(), 512, stop_on_error=True)


def test_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.jsonl", CHATS[1:2])
    write(tmp_path / "a.json", CHATS[:1])
    write(tmp_path / "deep" / "c.parquet", CHATS[2:])
    (tmp_path / "README.md").write_text("not data")
    found = list(read_rows(tmp_path))
    assert found == [("a.json row 1", CHATS[0]), ("b.jsonl line 1", CHATS[1]), ("c.parquet row 1", CHATS[2])]
    assert [place for place, _ in read_rows(tmp_path / "*.json*")] == ["a.json row 1", "b.jsonl line 1"]


def test_a_dataset_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(name: str, split: str, streaming: bool) -> list[dict[str, Any]]:
        asked.update(name=name, split=split, streaming=streaming)
        return CHATS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [row for _, row in read_rows("hub:user/chats:test")] == CHATS
    assert asked == {"name": "user/chats", "split": "test", "streaming": True}
    list(read_rows("hub:user/chats"))
    assert asked["split"] == "train"


def test_what_is_not_there_or_not_what_it_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data file .*gone"):
        list(read_rows(tmp_path / "gone" / "*.jsonl"))
    with pytest.raises(ValueError, match="no data file"):
        list(read_rows(tmp_path))
    (tmp_path / "x.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read"):
        list(read_rows(tmp_path / "x.parquet"))


def test_plain_text_is_learned_as_it_is(tmp_path: Path) -> None:
    loaded, _ = load_rows(write(tmp_path / "x.jsonl", [{"text": "once upon"}]), byte_tokenizer(), 512)
    with pytest.warns(UserWarning, match="prompts and headers too"):
        said = coverage(loaded)
    assert said == "9 of 9 tokens are learned (100%)"
    assert loaded[0].labels == loaded[0].input_ids
    assert byte_tokenizer().decode(loaded[0].input_ids) == "once upon"


def test_turns_of_a_table_have_no_empty_fields(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    ((_, row),) = read_rows(write(tmp_path / "x.parquet", [{"messages": turns}]))
    assert messages_of(row) == turns


def test_an_id_that_stands_twice_is_reported(tmp_path: Path) -> None:
    rows = [{"id": "one", **CHATS[0]}, {"id": "one", **CHATS[1]}]
    loaded, report = load_rows(write(tmp_path / "x.jsonl", rows), byte_tokenizer(), 512)
    assert [row.id for row in loaded] == ["one"]
    assert report.dropped[0][0] == "line 2"
    assert "stands twice" in report.dropped[0][1]


TOOLS = CHATML.replace("{% for message", "{% if tools %}{{ tools | tojson }}{% endif %}{% for message", 1).replace(
    "{{ message['content'] }}", "{{ message['content'] or message['tool_calls'] | tojson }}"
)


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    """Tables hold the list of tools as JSON text."""
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages, "tools": json.dumps(tools)}))
    tokenizer = byte_tokenizer(TOOLS)
    ((row,), _) = load_rows(tmp_path / "x.jsonl", tokenizer, 2048)
    assert '"name": "add", "description": "adds"' in tokenizer.decode(row.input_ids)
    learned = tokenizer.decode([label for label in row.labels if label != IGNORE])
    assert learned == json.dumps(call) + "<|im_end|>Two.<|im_end|>"


THINKING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("tags", [False, True])
def test_templates_that_rewrite_history_give_a_row_for_each_turn(tmp_path: Path, tags: bool) -> None:
    """Reports R6, D15: thinking is dropped from all but the last answer, as serving does."""
    template = THINKING
    if tags:
        whole = "{{ message.content }}{% endif %}"
        template = template.replace(whole, "{% generation %}{{ message.content }}{% endgeneration %}{% endif %}")
    tokenizer = byte_tokenizer(template)
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "<think>hm</think>one"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "<think>ah</think>two"},
    ]
    (tmp_path / "x.jsonl").write_text(json.dumps({"id": "chat", "messages": messages}))
    loaded, report = load_rows(tmp_path / "x.jsonl", tokenizer, 2048)
    assert report.kept == 1
    assert [row.id for row in loaded] == ["chat", "chat#2"]
    for row, turn in zip(loaded, (1, 3), strict=True):
        served = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"]
        assert row.input_ids[: len(served)] == served
        assert all(label == IGNORE for label in row.labels[: len(served)])
        learned = tokenizer.decode([label for label in row.labels if label != IGNORE])
        assert learned.removesuffix("<|im_end|>") == messages[turn]["content"]


def test_templates_that_keep_history_give_one_row(tmp_path: Path) -> None:
    chat = {"messages": [*CHATS[0]["messages"], *CHATS[1]["messages"]]}
    for template in (CHATML, TAGGED):
        loaded, _ = load_rows(write(tmp_path / "x.jsonl", [chat]), byte_tokenizer(template), 512)
        assert len(loaded) == 1
