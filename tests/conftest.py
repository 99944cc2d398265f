"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

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
