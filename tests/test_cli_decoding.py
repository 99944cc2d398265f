"""`medusa generate`, `chat` and `verify` as a user types them, on a tiny model."""

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import save_tiny_chat_model
from console import medusa
from rich.console import Console

from medusa import MedusaConfig, MedusaModel
from medusa.cli import main
from medusa.cli_answers import Piece, say
from medusa.inference import MedusaDecoder
from medusa.inference.benchmark import plain_generate
from medusa.loading import load_backbone, load_tokenizer
from medusa.tree_search import SearchedTree


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model and fresh heads, with a tree; fresh heads guess what the backbone itself would say next."""
    directory = tmp_path_factory.mktemp("decoding")
    save_tiny_chat_model(directory / "model")
    model = MedusaModel.attach(load_backbone(str(directory / "model")), MedusaConfig(num_heads=3))
    model.searched_tree = SearchedTree(((0,), (1,), (0, 0), (0, 0, 0)), (0.5, 0.2, 0.2, 0.1), 100)
    model.save_pretrained(directory / "heads", load_tokenizer(str(directory / "model")))
    return directory / "heads"


@pytest.fixture
def answers(checkpoint: Path) -> dict[str, str]:
    """What plain `generate` says."""
    model, tokenizer = load_backbone(str(checkpoint.parent / "model")), load_tokenizer(str(checkpoint))
    found = {}
    for text in ("one", "two words", "and three words", "né 日本"):
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        found[text] = tokenizer.decode(plain_generate(model, ids, 12), skip_special_tokens=True)
    return found


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets what stands on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def status(*arguments: object) -> int:
    """Exit status of a command that may fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["medusa", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_generate_says_what_generate_says(checkpoint: Path, answers: dict[str, str], typed: Any) -> None:
    line = ("generate", checkpoint, "--max-new-tokens", 12)
    for text, answer in answers.items():
        assert medusa(*line, "--prompt", text) == answer + "\n"
    typed("two words\n")
    assert medusa(*line) == answers["two words"] + "\n"
    figures = json.loads(medusa(*line, "--prompt", "one", "--json", "--show-accepted"))
    assert figures["text"] == answers["one"] == "".join(piece["text"] for piece in figures["pieces"])
    assert figures["finish_reason"] in ("length", "stop")
    assert figures["tree_nodes"] >= 1


def test_options_reach_the_decoder(checkpoint: Path, answers: dict[str, str]) -> None:
    line = ("generate", checkpoint, "--prompt", "one", "--max-new-tokens", 12)
    drawn = (*line, "--temperature", 2, "--top-k", 0, "--top-p", 1, "--nodes", 4, "--seed")
    assert medusa(*drawn, 1) == medusa(*drawn, 1)
    assert len({medusa(*drawn, seed) for seed in range(3)} | {answers["one"] + "\n"}) == 4
    for extra in (("--proposal", "sampled"), ("--proposal", "mixed"), ("--acceptance", "typical", "--epsilon", 0.2)):
        assert medusa(*drawn, 1, *extra)
    assert medusa(*line, "--system", "be brief") != answers["one"] + "\n"
    end = next(text for text in answers["one"][3:] if text.isprintable() and text != "�")
    stopped = medusa(*line, "--stop", end).removesuffix("\n")
    assert stopped == answers["one"][: len(stopped)]
    assert stopped.endswith(end)


def test_batches_are_appended_and_resumed(
    checkpoint: Path, answers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in answers))
    line = ("generate", checkpoint, "--input", source, "--output", out, "--max-new-tokens", 12, "--batch-size", 3)
    assert json.loads(medusa(*line, "--json"))["answered"] == 4
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(answers)
    assert [row["messages"][-1]["content"] for row in rows] == list(answers.values())
    assert all(0 < row["new_tokens"] <= 12 and row["tokens_per_step"] >= 1 for row in rows)
    whole = out.read_text()
    torn = whole.splitlines(keepends=True)
    out.write_text("".join(torn[:2]) + torn[2][:20])
    assert json.loads(medusa(*line, "--json"))["answered"] == 2
    assert out.read_text() == whole
    assert "answered now" in medusa(*line)
    assert status(*line, "--temperature", 1) == 1
    assert "holds answers made with options" in capsys.readouterr().err
    assert out.read_text() == whole


def test_plain_text_without_a_chat_template(
    checkpoint: Path, tmp_path: Path, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "heads"
    shutil.copytree(checkpoint, plain)
    (plain / "chat_template.jinja").unlink()
    said = medusa("generate", plain, "--prompt", "some text", "--max-new-tokens", 12)
    assert capsys.readouterr().err.count("no chat template") == 1
    model, tokenizer = load_backbone(str(checkpoint.parent / "model")), load_tokenizer(str(plain))
    ids = torch.tensor([tokenizer("some text")["input_ids"]])
    assert said == tokenizer.decode(plain_generate(model, ids, 12), skip_special_tokens=True) + "\n"
    typed("hello\n")
    assert status("chat", plain) == 1
    assert "use `medusa generate`" in capsys.readouterr().err


def test_chat_remembers_and_forgets(
    checkpoint: Path, answers: dict[str, str], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("one\n\ntwo words\n/reset\ntwo words\n/exit\nnever asked\n")
    said = medusa("chat", checkpoint, "--max-new-tokens", 12).split("> ")
    assert said[1] == answers["one"] + "\n"
    assert said[3] != answers["two words"] + "\n"  # it stands behind the first question
    assert said[5] == answers["two words"] + "\n"
    assert len(said) == 7
    assert capsys.readouterr().err.count(" per step") == 3


def test_chat_outlives_ctrl_c_and_a_full_context(
    checkpoint: Path,
    answers: dict[str, str],
    typed: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, calls = MedusaDecoder.stream, 0

    def interrupted(self: MedusaDecoder, *arguments: Any, **options: Any) -> Iterator[list[int]]:
        nonlocal calls
        calls += 1
        for i, block in enumerate(stream(self, *arguments, **options)):
            if calls <= 2 and i == 2 - calls:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(MedusaDecoder, "stream", interrupted)
    typed(f"one\n/reset\none\ntwo words\n{'x' * 600}\n/reset\none\n")  # the end of the input is Ctrl-D
    said = medusa("chat", checkpoint, "--max-new-tokens", 12)
    errors = capsys.readouterr().err
    assert errors.count(" a second, stopped\n") == 2
    assert "context holds 512" in " ".join(errors.split())
    assert said.rstrip("\n >").endswith(answers["one"].rstrip("\n >"))


def test_accepted_text_is_marked_on_a_terminal() -> None:
    pieces = [Piece("one", accepted=False), Piece(" two\n", accepted=True), Piece("[bold]3", accepted=False)]
    marked = Console(force_terminal=True, color_system="standard", file=io.StringIO(), no_color=False)
    kept: list[Piece] = []
    say(marked, iter(pieces), True, kept)
    assert marked.file.getvalue() == "one\x1b[32m two\x1b[0m\n[bold]3\n"  # type: ignore[attr-defined]
    assert kept == pieces
    plain = Console(force_terminal=True, file=io.StringIO())
    say(plain, iter(pieces), False, [])
    assert plain.file.getvalue() == "one two\n[bold]3\n"  # type: ignore[attr-defined]


def test_verify_finds_no_difference(checkpoint: Path, tmp_path: Path) -> None:
    figures = json.loads(medusa("verify", checkpoint, "--max-new-tokens", 8, "--nodes", 5, "--json"))
    assert figures["prompts"] == figures["identical"] == 12
    assert figures["tree_nodes"] == 5
    assert figures["dtype"] == "float32"
    assert figures["divergences"] == []
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    said = medusa("verify", checkpoint, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 8, "--nodes", 1)
    assert "2 answers identical" in " ".join(said.split())


def test_verify_ends_with_1_where_rounding_explains_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accept = MedusaDecoder.accept

    def wrong(self: MedusaDecoder, state: Any, candidates: Any, logits: Any, layout: Any) -> Any:
        """Take the second best token at one place of the answer."""
        row = state.rows[0]
        if row.new_tokens == 3:
            logits = logits.scatter(-1, logits.argmax(dim=-1, keepdim=True), -torch.inf)
        return accept(self, state, candidates, logits, layout)

    monkeypatch.setattr(MedusaDecoder, "accept", wrong)
    line = ("verify", checkpoint, "--limit", 2, "--max-new-tokens", 8, "--nodes", 1)
    assert status(*line, "--json") == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical"] == 0
    assert figures["unexplained"] == 2
    first = figures["divergences"][0]
    assert first["place"] == first["unexplained"] == 3
    assert first["choice"]["rank"] == 2
    assert first["choice"]["margin"] > 2 * first["choice"]["rounding"]
    assert status(*line) == 1
    assert "2 unexplained" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "heads"], "no prompt: give --prompt TEXT"),
        (["generate", "heads", "--input", "p.jsonl"], "--input FILE.jsonl and --output FILE.jsonl go together"),
        (["generate", "heads", "--prompt", "a", "--input", "p.jsonl", "--output", "o.jsonl"], "give one of them"),
        (["generate", "heads", "--input", "p.jsonl", "--output", "o.jsonl"], "there is no data file p.jsonl"),
        (["generate", "heads", "--prompt", "a", "--top-k", "5"], "--top-k is for drawn tokens"),
        (["generate", "heads", "--prompt", "a", "--epsilon", "0.1"], "--epsilon is for --acceptance typical"),
        (["generate", "heads", "--prompt", "a", "--acceptance", "fast"], "acceptance is 'fast'; allowed: 'exact'"),
        (["generate", "heads", "--prompt", "a", "--proposal", "fast"], "proposal is 'fast'; allowed: 'auto', 'top_k'"),
        (["generate", "heads", "--prompt", "x" * 600], "the prompt has"),
        (["generate", "absent", "--prompt", "a"], "'absent' is neither a directory nor a repository"),
        (["chat", "absent"], "'absent' is neither a directory nor a repository"),
        (["verify", "heads", "--prompts", "absent.jsonl"], "there is no data file absent.jsonl"),
        (["verify", "heads", "--dtype", "int8"], "dtype is 'int8'"),
        (["verify", "treeless", "--nodes", "4"], "--nodes 4 needs a tree"),
    ],
)
def test_bad_input_is_one_message_and_a_status(
    checkpoint: Path,
    arguments: list[str],
    message: str,
    typed: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    if "treeless" in arguments:
        shutil.copytree("heads", "treeless", ignore=lambda *_: ["medusa_tree.json"])
    typed("")
    assert status(*arguments) == 1
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert captured.out == ""
