"""The draw of `draw.py` on a GPU with our own Triton kernels: no sort, and noise only for the tokens that are kept.

The tokens are those of `draw_cuda.py`, which is used where the kernels are missing or do not prove themselves. Knows no
requests, penalties or row table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from model_worker.attention.triton import missing
from model_worker.device_copy import upload_together
from model_worker.sampling import draw_cuda
from model_worker.sampling.draw import Choices

log = logging.getLogger(__name__)

Draw = Callable[[torch.Tensor, Choices], torch.Tensor]

# Logits that a program reads at a time, and times that it does so for the noise.
_BLOCK = 1024
_BLOCKS = 8
# The same of the search for edges, in which a row has one program.
_EDGE_BLOCK = 4096
_EDGE_WARPS = 16
# Tokens of a row that may lie before the edge or at it, for a search among these alone.
_ROOM = 4096
# Rows of the proof.
_PROOF_ROWS = 16


def draw(scaled: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Draw tokens i64[rows] for rows that are not greedy, whose logits arrive shifted and scaled, in float32."""
    from model_worker.cuda import draw_kernels as kernels

    rows, width = scaled.shape
    device = scaled.device
    if scaled.stride(1) != 1:
        scaled = scaled.contiguous()
    kinds = {"top_p": np.float64, "top_k": np.int32, "log_min_p": np.float32}
    columns = [choices.keys.view(np.int64), *(getattr(choices, name).astype(kind) for name, kind in kinds.items())]
    keys, top_p, top_k, log_min_p = upload_together(columns, device)
    edges = torch.empty(rows, dtype=torch.float32, device=device)
    ties = torch.empty(rows, dtype=torch.int32, device=device)
    scratch = torch.empty(rows, _ROOM, dtype=torch.float32, device=device)
    kernels.edge_kernel[(rows,)](
        edges,
        ties,
        scratch,
        scaled,
        top_k,
        top_p,
        log_min_p,
        scaled.stride(0),
        width,
        BLOCK=_EDGE_BLOCK,
        ROOM=_ROOM,
        num_warps=_EDGE_WARPS,
    )
    parts = -(-width // (_BLOCK * _BLOCKS))
    scores = torch.empty(rows, parts, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=device)
    kernels.pick_kernel[(rows, parts)](
        scores, tokens, scaled, keys, edges, ties, scaled.stride(0), width, parts, BLOCK=_BLOCK, BLOCKS=_BLOCKS
    )
    # The first of equal scores, as everywhere.
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


def proven(device: torch.device, width: int) -> Draw:
    """Return the draw of a GPU: this one, if it draws what `draw_cuda` draws from random logits, else that one."""
    reason = missing()
    if reason is None:
        try:
            if _draws_the_same(device, width):
                return draw
            reason = "the kernels draw other tokens"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers have errors of their own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    log.warning("tokens are drawn by torch's operations, which sort: %s", reason)
    return draw_cuda.draw


def _draws_the_same(device: torch.device, width: int) -> bool:
    rng = np.random.default_rng(0)
    rows = _PROOF_ROWS
    # Peaked and flat rows, and some of few different logits, which are equal at edges.
    logits = rng.normal(0, 1, (rows, width)) * np.geomspace(0.1, 8, rows)[:, None]
    logits[::4] = np.round(logits[::4])
    scaled = torch.from_numpy(logits.astype(np.float32)).to(device)
    scaled -= scaled.max(-1, keepdim=True).values
    choices = Choices(
        greedy=np.zeros(rows, np.bool_),
        top_k=np.where(np.arange(rows) % 3 == 0, min(40, width), width).astype(np.int32),
        top_p=np.where(np.arange(rows) % 2 == 0, 0.9, 1.0),
        log_min_p=np.where(np.arange(rows) % 5 == 0, np.log(0.02), -np.inf).astype(np.float32),
        keys=rng.integers(0, 1 << 63, rows).astype(np.uint64),
        logprobs=np.zeros(rows, np.int8),
    )
    return torch.equal(draw(scaled, choices), draw_cuda.draw(scaled, choices))
