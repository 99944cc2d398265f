"""Stop in good order when the machine is wanted back."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator


@contextmanager
def stop_asked(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """SIGTERM (a job's time limit, a preempted machine) no longer kills: ask after each step whether it came.

    Gives a function that all ranks must call together; it says the same to all, whichever rank got the signal.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    def anywhere() -> bool:
        if accelerator.num_processes == 1:
            return asked
        return bool(accelerator.reduce(torch.tensor(int(asked), device=accelerator.device), reduction="sum"))

    if threading.current_thread() is not threading.main_thread():  # Python hears signals in the main thread only
        yield anywhere
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield anywhere
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def undivided() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: no weights are saved that are ahead of the counted steps."""
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
