import json
from pathlib import Path

import pytest
import torch
from chatml import save_tiny_chat_model

from medusa.backbone import Backbone
from medusa.loading import load_backbone, load_tokenizer
from medusa.train import distill as module
from medusa.train.answer_file import answered_chats, failures_file
from medusa.train.distill import distill
from medusa.train.hidden_states import LiveHiddenStates, RecordedHiddenStates, recording_directory
from medusa.train.prompts import read_prompts
from medusa.train.rows import load_rows


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    directory = save_tiny_chat_model(tmp_path_factory.mktemp("model"))
    prompts = directory / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": "why " * (1 + i % 4) + str(i)} for i in range(7)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(str(directory))
    return Backbone(load_backbone(str(directory))), tokenizer, prompts


def test_answers_are_the_models_own(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Batched and padded, each answer is what the model gives to that prompt alone; recorded states are its own too."""
    backbone, tokenizer, prompts = setup
    found, _ = read_prompts(prompts, tokenizer)
    out = tmp_path / "answers.jsonl"
    assert distill(backbone, tokenizer, found, out, max_new_tokens=12, batch_size=3, recorded=True) == 7
    rows, report = load_rows(out, tokenizer, 1000)
    assert report.kept == 7
    by_id = {prompt.id: prompt for prompt in found}
    for row in rows:
        ids = torch.tensor([by_id[row.id].input_ids])
        alone = backbone.model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0].tolist()
        assert row.input_ids == alone
        assert row.labels[ids.shape[1] :] == alone[ids.shape[1] :]
    recorded = RecordedHiddenStates(recording_directory(out)).of(rows)
    for states, live in zip(recorded, LiveHiddenStates(backbone).of(rows), strict=True):
        torch.testing.assert_close(states, live, rtol=1e-4, atol=1e-4)


def test_answers_may_hold_any_end_of_line(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    rows = [{"id": "a", "text": "one\u2028two\u0085three"}, {"id": "b", "text": ""}]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert set(answered_chats(out)) == {"a", "b"}


def test_interrupted_run_continues_and_heals_a_torn_line(setup, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    backbone, tokenizer, prompts = setup
    found, _ = read_prompts(prompts, tokenizer)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    distill(backbone, tokenizer, found, whole, max_new_tokens=5, batch_size=2)
    original, calls = module.answer, []

    def interrupted(*arguments):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(module, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill(backbone, tokenizer, found, broken, max_new_tokens=5, batch_size=2)
    assert len(broken.read_text().splitlines()) == 4  # two whole batches
    with broken.open("a") as file:
        file.write('{"id": "p6", "mess')
    monkeypatch.setattr(module, "answer", original)
    assert distill(backbone, tokenizer, found, broken, max_new_tokens=5, batch_size=2) == 3
    assert sorted(broken.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert distill(backbone, tokenizer, found, broken, max_new_tokens=5, batch_size=2) == 0


def test_other_settings_do_not_mix(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    backbone, tokenizer, prompts = setup
    found, _ = read_prompts(prompts, tokenizer, limit=1)
    out = tmp_path / "answers.jsonl"
    distill(backbone, tokenizer, found, out, max_new_tokens=2)
    before = out.read_text()
    with pytest.raises(ValueError, match="max_new_tokens 2 instead of 3"):
        distill(backbone, tokenizer, found, out, max_new_tokens=3)
    assert out.read_text() == before


def test_answers_of_an_older_version_go_on(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Their settings do not name the options that came later."""
    backbone, tokenizer, prompts = setup
    out = tmp_path / "answers.jsonl"
    distill(backbone, tokenizer, read_prompts(prompts, tokenizer, limit=1)[0], out, max_new_tokens=2)
    settings = out.with_suffix(".settings.json")
    stored = json.loads(settings.read_text())
    del stored["top_logprobs"]
    settings.write_text(json.dumps(stored))
    assert distill(backbone, tokenizer, read_prompts(prompts, tokenizer, limit=2)[0], out, max_new_tokens=2) == 1


def test_prompts_of_every_shape(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, tokenizer, _ = setup
    file = tmp_path / "x.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    sharegpt = [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]
    rows = [{"prompt": "p"}, {"messages": chat}, {"conversations": sharegpt}, {"x": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, report = read_prompts(file, tokenizer)
    assert [[m["content"] for m in prompt.messages] for prompt in prompts] == [["p"], ["a"], ["d"]]
    assert [place for place, _ in report.dropped] == ["line 4"]
    file.write_text('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n')
    with pytest.raises(ValueError, match="line 2: id '1' stands twice"):
        read_prompts(file, tokenizer)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file, tokenizer)


def test_damaged_or_missing_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded hidden states"):
        RecordedHiddenStates(tmp_path)
    (tmp_path / "p0.safetensors").write_bytes(b"\x10\x00\x00")
    with pytest.raises(ValueError, match=r"p0.safetensors are damaged"):
        RecordedHiddenStates(tmp_path)


def test_turns_see_the_backbones_own_answers(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    backbone, tokenizer, _ = setup
    file, out = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    said = ["one", "FOREIGN", "two", "FOREIGN"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    rows = [{"id": "c", "messages": chat}, {"id": "p", "prompt": "alone"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, _ = read_prompts(file, tokenizer, turns=None)
    assert distill(backbone, tokenizer, prompts, out, max_new_tokens=6, top_logprobs=3) == 3
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert set(found) == {"c", "p", "c#2"}
    first, second = found["c"]["messages"], found["c#2"]["messages"]
    assert second[:-1] == [*first, {"role": "user", "content": "two"}]
    for row in found.values():
        start = row["answer_start"]
        asked = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        assert row["input_ids"][:start] == asked
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            likely = backbone.model(ids).logits[0, start - 1 : -1].log_softmax(dim=-1).topk(3)
        assert row["top_logprobs"]["ids"] == likely.indices.tolist()
        torch.testing.assert_close(torch.tensor(row["top_logprobs"]["logprobs"]), likely.values, rtol=0, atol=1e-4)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(line for line in lines if '"c#2"' not in line))
    assert distill(backbone, tokenizer, prompts, out, max_new_tokens=6, top_logprobs=3) == 1
    assert sorted(out.read_text().splitlines()) == sorted(line.strip() for line in lines)


def test_a_prompt_beyond_the_context_is_recorded(setup, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    backbone, tokenizer, _ = setup
    file, out = tmp_path / "x.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": "long", "prompt": "x" * 600}, {"id": "short", "prompt": "x"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, _ = read_prompts(file, tokenizer)
    assert distill(backbone, tokenizer, prompts, out, max_new_tokens=2) == 1
    assert "the context 512" in failures_file(out).read_text()
