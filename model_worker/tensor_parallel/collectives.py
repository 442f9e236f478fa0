"""Sums and gathers tensors over the ranks by torch.distributed: NCCL on GPUs, gloo on CPUs of several hosts.

Only `least` waits for the device, so a recorded step has its sums in it. NCCL wants a first use before a recording,
which the passes of the start are, and the same order of calls on all ranks, which compute the same batches. All ranks
get the same bits of a sum. On several hosts sums are counted, and an error of one is the loss of a rank. Knows tensors.
Does not know what is computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from model_worker.model import first_line
from model_worker.tensor_parallel.exchange import START_SECONDS, GroupLost


def backend_for(device: torch.device) -> str:
    """Return torch's name of what joins tensors of a device. ValueError where this torch has not got it."""
    name = "nccl" if device.type == "cuda" else "gloo"
    available = dist.is_available() and (dist.is_nccl_available() if name == "nccl" else dist.is_gloo_available())
    if not available:
        raise ValueError(f"ranks on {device} are joined by {name}, and torch {torch.__version__} was built without it")
    return name


class Collectives:
    """One rank's end of a group whose ranks meet at a file, which only their user may read, or at a store over tcp."""

    def __init__(self, rank: int, ranks: int, device: torch.device, meeting: Path | Store) -> None:
        """Meet the others, which are all there. ValueError where the device's tensors cannot be joined."""
        self.rank = rank
        self.ranks = ranks
        self._device = device
        name = backend_for(device)
        met = {"init_method": meeting.as_uri()} if isinstance(meeting, Path) else {"store": meeting}
        dist.init_process_group(
            # On several hosts the hosts' own tensors are joined, too.
            name if isinstance(meeting, Path) or device.type == "cpu" else f"cpu:gloo,cuda:{name}",
            **met,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=START_SECONDS),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which have one shape and are overwritten."""
        total = part.contiguous()
        dist.all_reduce(total)
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the ranks' parts along the last dimension. `widths` are their sizes in it."""
        widest = max(widths)
        rows = part.reshape(-1, part.shape[-1])
        # All give as much; what is behind a narrower part is left away again.
        mine = torch.nn.functional.pad(rows, (0, widest - rows.shape[-1])) if rows.shape[-1] < widest else rows
        parts = torch.empty((self.ranks, *mine.shape), dtype=part.dtype, device=part.device)
        # The same under the name that torch had for it before 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(parts.view(-1, widest), mine.contiguous())
        joined = torch.cat([other[:, :width] for other, width in zip(parts, widths, strict=True)], dim=-1)
        return joined.view(*part.shape[:-1], sum(widths))

    def give(self, tensor: Tensor) -> Tensor:
        """Give the first rank's tensor to all others, which have one of the same shape. Returns it."""
        dist.broadcast(tensor, src=0)
        return tensor

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers. This waits for the device."""
        found = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found.item())


class NetworkCollectives(Collectives):
    """The same on several hosts, where a sum fails when a rank is lost. `explain` says which one was.

    `exchanges` counts sums and gathers as they begin, and `digest` is one of their kinds, types and shapes.
    """

    def __init__(
        self, rank: int, ranks: int, device: torch.device, meeting: Store, explain: Callable[[], GroupLost | None]
    ) -> None:
        self.exchanges = 0
        self.digest = 0
        self._explain = explain
        with self._counted("meeting"):
            super().__init__(rank, ranks, device, meeting)

    def counts(self) -> tuple[int, int]:
        """Return the number of sums and gathers that have begun, and their digest."""
        return self.exchanges, self.digest

    def sum(self, part: Tensor) -> Tensor:
        with self._counted(f"sum {part.dtype} {part.shape}"):
            return super().sum(part)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        with self._counted(f"gather {part.dtype} {part.shape[:-1]} {widths}"):
            return super().gather(part, widths)

    def give(self, tensor: Tensor) -> Tensor:
        with self._counted(f"give {tensor.dtype} {tensor.shape}"):
            return super().give(tensor)

    def least(self, number: int) -> int:
        with self._counted("least"):
            return super().least(number)

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        self.exchanges += 1
        self.digest = zlib.crc32(what.encode(), self.digest)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            unknown = GroupLost(f"exchange {self.exchanges} fails: {first_line(error)}")
            raise self._explain() or unknown from error
