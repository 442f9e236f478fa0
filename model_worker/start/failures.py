"""What a worker that cannot start reports, and its exit code. Knows errors; does not know what was tried."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model_worker.cuda.memory import CudaMemory, explain_no_memory, is_for_want_of_memory
from model_worker.keeper.kept_weights import KeptWeights
from model_worker.tensor_parallel.exchange import GroupLost, NotMet
from shared import phases
from shared.load_errors import may_pass

log = logging.getLogger(__name__)

# Exit code (EX_CONFIG of sysexits.h) of a process that has reported why it cannot work.
CANNOT_WORK = 78


@contextmanager
def reported(device: str, kept: KeptWeights | None) -> Iterator[None]:
    """Report why the start in this context fails, and end the process. A keeper may have weights of it on `device`."""
    try:
        yield
    except (ValueError, OSError) as error:
        phases.fatal(str(error), may_pass(error))
        sys.exit(CANNOT_WORK)
    except NotMet as missing:
        phases.missed(str(missing))
        sys.exit(1)
    except GroupLost as lost:
        log.error("this worker ends: %s", lost)
        sys.exit(1)
    except RuntimeError as error:
        if not is_for_want_of_memory(error):
            raise
        memory = CudaMemory(torch.device(device), 0 if kept is None else kept.size)
        phases.fatal(*explain_no_memory(memory, error))
        sys.exit(CANNOT_WORK)
