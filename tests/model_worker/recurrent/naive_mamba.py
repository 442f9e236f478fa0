"""Mamba-2 as its authors define it, token by token: an independent reference for time steps with a limit.

h = exp(dt A) h + dt B x and y = C h + D x, with dt = softplus(dt + bias) within the limit (Dao and Gu, 2024).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus


def compute_naively(model: nn.Module, limit: tuple[float, float]) -> None:
    """Let the Mamba-2 layers of transformers' Nemotron-H compute whole texts so, with time steps in `limit`."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            mixer: Any = module
            mixer.forward = partial(_forward, mixer, limit)


def _forward(mixer: Any, limit: tuple[float, float], hidden_states: Tensor, **_: Any) -> Tensor:
    """Compute one text [1, n, hidden]."""
    inner, states, groups = mixer.intermediate_size, mixer.ssm_state_size, mixer.n_groups
    gate, inputs, steps = mixer.in_proj(hidden_states).split([inner, mixer.conv_dim, mixer.num_heads], -1)
    # It pads in front and behind.
    inputs = silu(mixer.conv1d(inputs.transpose(1, 2))[..., : hidden_states.shape[1]]).transpose(1, 2)
    x, b, c = inputs[0].split([inner, groups * states, groups * states], -1)
    heads = mixer.num_heads // groups
    steps = softplus(steps[0] + mixer.dt_bias).clamp(*limit)
    state = torch.zeros(mixer.num_heads, mixer.head_dim, states)
    outputs = []
    for x_t, b_t, c_t, step in zip(x, b, c, steps, strict=True):
        x_t = x_t.view(mixer.num_heads, mixer.head_dim)
        b_t, c_t = (each.view(groups, states).repeat_interleave(heads, 0) for each in (b_t, c_t))
        decay = torch.exp(-step * mixer.A_log.exp())
        state = decay[:, None, None] * state + (step[:, None] * x_t)[..., None] * b_t[:, None]
        outputs.append(((state * c_t[:, None]).sum(-1) + mixer.D[:, None] * x_t).flatten())
    out: Tensor = mixer.out_proj(mixer.norm(torch.stack(outputs)[None], gate))
    return out
