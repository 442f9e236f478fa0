"""Groups of torch.distributed in which a trainer sends tensors, and the files in which these are kept.

A group's calls wait for others, so they run in a thread of their own, one after the other, while steps go on. A socket
wakes the receiver of their results. Knows ranks and tensors. Does not know the model.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from interfaces import GroupSpec, TensorSpec, WeightsCommand, WeightsTask
from model_worker.wake_up import WakeUp

log = logging.getLogger(__name__)

# Time in which the other members of a group must come, and send.
GROUP_SECONDS = 120
# Bytes that a message of packed tensors exceeds with its last tensor, if there are as many: both sides count alike.
PACKED_BYTES = 1 << 30
# Types that tensors may be sent in, by torch's names.
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "int32", "int64")
}
_BACKENDS = ("gloo", "nccl")


class GroupRefused(ValueError):
    """A group's call that cannot be carried out; the message names the value and the remedy."""


class Groups:
    """The groups of one worker. `most_bytes` bounds the tensors of one message."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._groups: dict[str, Any] = {}
        # Names of the groups whose trainer always sends packed tensors.
        self._packed: set[str] = set()
        # By the names of groups: the bytes that a message of packed tensors exceeds.
        self._packed_bytes: dict[str, int] = {}
        self._commands: SimpleQueue[WeightsCommand] = SimpleQueue()
        self._done: deque[tuple[WeightsCommand, str]] = deque()
        self._thread: Thread | None = None
        self._wake_up = WakeUp()

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def obey(self, command: WeightsCommand) -> None:
        """Begin to carry out JOIN, LEAVE or RECEIVE."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="groups", daemon=True)
            self._thread.start()
        self._commands.put(command)

    def take(self) -> list[tuple[WeightsCommand, str]]:
        """The commands that were carried out since the last call, each with the reason why it was not, or none."""
        self._wake_up.clear()
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def _run(self) -> None:
        # The cores are for steps.
        torch.set_num_threads(1)
        while True:
            command = self._commands.get()
            error = ""
            try:
                self._carry_out(command)
            except Exception as caught:  # the order fails, and not the worker
                error = _reason(caught)
            self._done.append((command, error))
            self._wake_up.wake()

    def _carry_out(self, command: WeightsCommand) -> None:
        group = command.group
        assert group is not None
        match command.task:
            case WeightsTask.JOIN:
                self._join(group)
            case WeightsTask.LEAVE:
                self._leave(group.name)
            case _:
                self._receive(command, group)

    def _join(self, group: GroupSpec) -> None:
        if group.backend not in _BACKENDS:
            raise GroupRefused(f"backend {group.backend!r:.50} is none of {', '.join(_BACKENDS)}")
        if group.backend == "nccl" and not (self._device.type == "cuda" and dist.is_nccl_available()):
            raise GroupRefused("backend nccl needs a CUDA device: use gloo")
        if not dist.is_available() or (group.backend == "gloo" and not dist.is_gloo_available()):
            raise GroupRefused(f"this torch was built without {group.backend}")
        self._leave(group.name)
        self._groups[group.name] = _member(group)
        if group.packed:
            self._packed.add(group.name)
        self._packed_bytes[group.name] = group.packed_bytes or PACKED_BYTES

    def _leave(self, name: str) -> None:
        self._packed.discard(name)
        self._packed_bytes.pop(name, None)
        found = self._groups.pop(name, None)
        if found is not None:
            dist.destroy_process_group(found)

    def _receive(self, command: WeightsCommand, spec: GroupSpec) -> None:
        """Receive tensors, and write them to the command's path, if it has one."""
        name = spec.name
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise GroupRefused(
                f"group_name {name!r:.100} is no group of this server (it has {known}): initialise it first"
            )
        _check_sender(command.sender, group)
        self._check(command.tensors)
        tensors: dict[str, Tensor] = {}
        packed = spec.packed or name in self._packed
        most = (spec.packed_bytes or self._packed_bytes[name]) if packed else 0
        for message in _messages(command.tensors, most):
            if most:
                sizes = [_size(tensor) for tensor in message]
                numbers = self._received(group, command.sender, [sum(sizes)], torch.uint8)
                for tensor, part in zip(message, numbers.split(sizes), strict=True):
                    tensors[tensor.name] = part.clone().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
            else:
                (tensor,) = message
                received = self._received(group, command.sender, tensor.shape, _DTYPES[tensor.dtype])
                tensors[tensor.name] = received
        if command.path:
            keep(tensors, Path(command.path))

    def _received(self, group: Any, sender: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Receive one message."""
        # Zeros: where a sender sends too little, what memory held before must not become a weight.
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor, group_src=sender, group=group)
        return tensor.cpu()

    def _check(self, specs: list[TensorSpec]) -> None:
        """Refuse tensors that cannot be received, before the first is awaited."""
        size = 0
        for spec in specs:
            if spec.dtype not in _DTYPES:
                raise GroupRefused(f"dtype {spec.dtype!r:.50} of {spec.name!r:.200} is none of {', '.join(_DTYPES)}")
            size += _size(spec)
            if min(spec.shape, default=0) < 0 or size > self._most_bytes:
                raise GroupRefused(
                    f"shape {spec.shape} of {spec.name!r:.200} is too large: at most {self._most_bytes} bytes may be "
                    "sent at a time"
                )


def _size(spec: TensorSpec) -> int:
    """Return the bytes of a tensor."""
    size: int = math.prod(spec.shape) * _DTYPES[spec.dtype].itemsize
    return size


def _messages(specs: list[TensorSpec], most: int) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each message: as many as it takes to exceed `most` bytes, or one if that is 0."""
    message: list[TensorSpec] = []
    size = 0
    for spec in specs:
        message.append(spec)
        size += _size(spec)
        if not most or size > most:
            yield message
            message = []
            size = 0
    if message:
        yield message


def _check_sender(sender: int, group: Any) -> None:
    """Refuse a rank that is none of the group, or this worker's: then it would send, and not receive."""
    world_size = group.size()
    if not 0 <= sender < world_size or sender == group.rank():
        raise GroupRefused(
            f"src {sender} is not the rank of a trainer: the group has ranks 0 to {world_size - 1}, and rank "
            f"{group.rank()} is this model worker"
        )


def keep(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a file that only this server's user may read."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    unnamed = path.with_suffix(".part")
    os.close(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unnamed)
    unnamed.chmod(0o600)
    unnamed.replace(path)


def _member(group: GroupSpec) -> Any:
    """Join a group beside the default one, as trainers do that have one of their own."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=GROUP_SECONDS)
    address = f"[{group.address}]" if ":" in group.address else group.address
    meeting = rendezvous(f"tcp://{address}:{group.port}", group.rank, group.world_size, timeout=timeout)
    store, rank, world_size = next(iter(meeting))
    store.set_timeout(timeout)
    made, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(group.backend),
        c10d.PrefixStore(group.name, store),
        group_name=c10d.GroupName(group.name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[made] = {i: i for i in range(world_size)}
    return made


def _reason(error: Exception) -> str:
    if isinstance(error, GroupRefused):
        return str(error)
    log.warning("a call of a group failed", exc_info=error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason was given'}"
