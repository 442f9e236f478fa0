"""Whether the kernels that fill recorded steps put there, on this device, what torch's operations put there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import DecodeBuffers
from model_worker.cuda.mixed_graphs import MixedBuffers

log = logging.getLogger(__name__)

_ROWS = 5
_TOKENS = 16
_BLOCK_SIZE = 4
_BLOCKS = 6
_SPARE_BLOCK = 99
# New tokens of each sequence, and those before them: a decode step, and one with prompts.
_STEPS = (((1, 1, 1), (0, 19, 7)), ((6, 1, 4), (0, 11, 3)))


def fills_are_right(device: torch.device) -> bool:
    """Fill steps in both ways and compare them. The log says why kernels are not used."""
    places = _BLOCKS, _BLOCK_SIZE, _SPARE_BLOCK, device
    try:
        for queries, pasts in _STEPS:
            for deferred in (False, True):
                batch = _step(queries, pasts, deferred, device)
                mixed = (MixedBuffers(_TOKENS, _ROWS, *places, kernels) for kernels in (False, True))
                right = _agree(*mixed, batch=batch, size=_TOKENS)
                if max(queries) == 1:
                    decode = (DecodeBuffers(_ROWS, *places, kernels) for kernels in (False, True))
                    right &= _agree(*decode, batch=batch, size=_ROWS)
                if not right:
                    log.warning("recorded steps are filled by torch's operations, since kernels fill them otherwise")
                    return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers have errors of their own
        reason = str(error).partition("\n")[0]
        log.warning("recorded steps are filled by torch's operations, since kernels fail: %s", reason)
        return False
    return True


def _agree(*both: DecodeBuffers | MixedBuffers, batch: ForwardBatch, size: int) -> bool:
    for buffers in both:
        buffers.fill(batch, size)
    plain, launched = both
    columns = vars(launched)
    return all(torch.equal(value, columns[name]) for name, value in vars(plain).items() if isinstance(value, Tensor))


def _step(queries: Sequence[int], pasts: Sequence[int], deferred: bool, device: torch.device) -> ForwardBatch:
    draws = np.random.default_rng(0)
    lengths = np.array(queries) + np.array(pasts)
    tables = draws.integers(0, _SPARE_BLOCK, (len(queries), -(-int(lengths.max()) // _BLOCK_SIZE)))
    count = sum(queries)
    tokens = draws.integers(0, 100, count)
    owners = draws.integers(-1, _ROWS, count) if deferred else None
    wanted = np.cumsum(queries) - 1
    batch = ForwardBatch.build(tokens, np.array(queries), lengths, tables, _BLOCK_SIZE, wanted, device, owners=owners)
    return replace(batch, last_tokens=torch.arange(200, 200 + _ROWS, device=device))
