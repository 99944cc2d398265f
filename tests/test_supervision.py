import pytest
from chatml import CHATML, TAGGED, byte_tokenizer

from medusa.train.chat import RowError
from medusa.train.supervision import IGNORE, supervise

CHAT = [
    {"role": "user", "content": "hi?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "ok?"},
    {"role": "assistant", "content": "no"},
]


def pieces(tokenizer, labels: list[int]) -> list[str]:
    """The stretches of text that are learned."""
    found: list[list[int]] = [[]]
    for label in labels:
        if label == IGNORE:
            found.append([])
        else:
            found[-1].append(label)
    return [tokenizer.decode(part) for part in found if part]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_exactly_the_answers_and_their_end_are_learned(template: str) -> None:
    """Reports R1 and R5: the same with and without generation tags; never all, never nothing."""
    tokenizer = byte_tokenizer(template)
    ((ids, labels),) = supervise(tokenizer, CHAT)
    assert pieces(tokenizer, labels) == ["yes<|im_end|>", "no<|im_end|>"]
    assert ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))


def test_answer_that_also_stands_in_the_question() -> None:
    tokenizer = byte_tokenizer()
    ((_, labels),) = supervise(tokenizer, [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}])
    assert [label for label in labels if label != IGNORE] == labels[-5:-1]


@pytest.mark.parametrize("answer", ["", "\n", " a ", "line\n\n", "<|im_start|>", "é\U0001f600"])
def test_awkward_answers(answer: str) -> None:
    tokenizer = byte_tokenizer()
    ((_, labels),) = supervise(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}])
    assert "".join(pieces(tokenizer, labels)) == answer + "<|im_end|>"


def test_one_bos_when_template_and_tokenizer_both_add_it() -> None:
    """Report R8."""
    from tokenizers import processors

    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML)
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    ((ids, _),) = supervise(tokenizer, CHAT[:2])
    ((plain, _),) = supervise(byte_tokenizer("{{ bos_token }}" + CHATML), CHAT[:2])
    assert ids == plain


def test_a_template_that_changes_its_own_prompt_is_refused() -> None:
    """What would be learned is not what serving sees, not even for the last turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nAnswer: {% endif %}"
    )
    with pytest.raises(RowError, match=r"turn 2 in another way than its prompt begins"):
        supervise(byte_tokenizer(template), CHAT)


def test_no_template_no_answer() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(RowError, match="no assistant turn"):
        supervise(tokenizer, CHAT[:1])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        supervise(tokenizer, CHAT)
