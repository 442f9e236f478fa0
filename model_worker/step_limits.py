"""The most that a worker takes in a step, where the operator sets no other numbers: what suits its device.

The scheduler learns them from the worker's hello. Knows settings and devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.setting_forms import running_rows, step_tokens
from shared.settings import Settings

if TYPE_CHECKING:
    import torch


def most_tokens(settings: Settings, device: torch.device) -> int:
    """Return the most tokens of a step on a device."""
    if device.type != "cuda":
        return step_tokens(settings.max_batch_tokens, 0)
    import torch

    memory = torch.cuda.get_device_properties(device).total_memory
    return step_tokens(settings.max_batch_tokens, memory)


def most_rows(settings: Settings, device: torch.device) -> int:
    """Return the most sequences that are computed together on a device."""
    return running_rows(settings.max_running, device.type)
