"""How many threads torch's own operations use. Knows nothing of what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations on the calling thread.

    Its other threads spin after each operation, and would keep cores from the compiled layers and from other processes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
