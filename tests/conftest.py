"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chatml import save_tiny_chat_model
from training import write_chats

# Before anything imports huggingface_hub: a test that asks the network is wrong.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for each other on a busy machine cost 100 times."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats to train it on."""
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")
