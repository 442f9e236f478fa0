"""Other weights for the running model: names, paths and tensors are checked here, and the scheduler acts.

Every dialect's routes call these functions. Knows folders and uploads; knows neither routes nor what a tensor means.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api_server.engine.questions import NotSent
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid, shown
from api_server.generation import pausing
from api_server.generation.adapters import safetensors_of
from api_server.state import ServerState
from interfaces import (
    FIRST_VERSION,
    Action,
    GroupSpec,
    RunningMode,
    TensorSpec,
    WeightsAction,
    WeightsAnswer,
)
from shared.adapter_paths import folders_of
from shared.weights_paths import confined_weights

# What becomes of running requests, by the names that orders have.
RUNNING = {
    "wait": RunningMode.WAIT,
    "in_place": RunningMode.KEEP,
    "retract": RunningMode.RETRACT,
    "abort": RunningMode.ABORT,
}
# Most characters of a version's name, tensors in one message, and dimensions of a tensor.
_LONGEST_NAME = 256
_MOST_TENSORS = 100_000
_MOST_DIMENSIONS = 16
_MOST_PORT = 65_535
_MOST_WORLD = 65_536


def version_of(server: ServerState) -> str:
    """The name of the version that is served."""
    status = server.engine.status
    return FIRST_VERSION if status is None else status.weights.name


async def from_disk(server: ServerState, path: str, version: str, running: int) -> WeightsAnswer:
    """Serves the weights in a folder or file below those of --weights-dirs, or the server's own again.

    Raises RequestFailed for a path that cannot be used, and where the scheduler does not answer, as all these do.
    """
    folders = folders_of(server.settings.weights_dirs)
    own = server.settings.model
    if not folders and path != own:
        raise invalid(
            f"model_path {shown(path)}: this server reads no other weights than its own; start it with --weights-dirs "
            "DIR, below which they may lie",
            "model_path",
        )
    try:
        source = await asyncio.to_thread(confined_weights, path, folders, own)
    except (ValueError, OSError) as error:
        raise invalid(f"model_path: {error}", "model_path") from None
    return await ask(server, WeightsAction.UPDATE, version=_named(version), source=source, running=running)


async def from_files(
    server: ServerState, texts: Sequence[str], version: str, running: int, hold: bool
) -> WeightsAnswer:
    """Serves tensors that come as safetensors files in base64, in the place of those of the same names."""
    uploads = server.uploaded_weights
    if uploads is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "this server has no run directory for tensors that are sent to it")
    if not texts:
        raise invalid("serialized_named_tensors must have at least one safetensors file", "serialized_named_tensors")
    name = _named(version)
    paths = await _written(uploads, texts)
    try:
        return await ask(server, WeightsAction.UPDATE, version=name, overlays=paths, running=running, hold=hold)
    except _NotTaken as error:
        _remove(paths)
        raise error.failed from None
    except RequestFailed as error:
        if error.kind is ErrorKind.INVALID:
            _remove(paths)
        raise


async def from_group(
    server: ServerState,
    group: GroupSpec,
    tensors: Sequence[TensorSpec],
    sender: int,
    version: str,
    running: int,
    hold: bool,
) -> WeightsAnswer:
    """Receives tensors over a group from the rank `sender`, and serves them, or holds them for a later order."""
    if not 1 <= len(tensors) <= _MOST_TENSORS:
        raise invalid(f"names must name 1 to {_MOST_TENSORS} tensors, got {len(tensors)}", "names")
    if len({spec.name for spec in tensors}) != len(tensors):
        raise invalid("names must name each tensor once", "names")
    if not 0 <= sender < _MOST_WORLD:
        raise invalid(f"src must be the trainer's rank in the group, got {sender}", "src")
    return await ask(
        server,
        WeightsAction.RECEIVE,
        version=_named(version),
        group=group,
        tensors=list(tensors),
        sender=sender,
        running=running,
        hold=hold,
    )


def specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Tensors by three lists of equal lengths."""
    if not len(names) == len(dtypes) == len(shapes):
        raise invalid(
            f"names, dtypes and shapes must be of one length, got {len(names)}, {len(dtypes)} and {len(shapes)}",
            "names",
        )
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if len(shape) > _MOST_DIMENSIONS or any(not 0 <= length < 2**31 for length in shape):
            raise invalid(f"shapes: that of {shown(name)} is none of a tensor: {shape[:20]}", "shapes")
        found.append(TensorSpec(name, dtype.removeprefix("torch."), list(shape)))
    return found


async def join(server: ServerState, group: GroupSpec) -> WeightsAnswer:
    """Has every worker join a group. The first one's rank is the group's, and the others' follow."""
    workers = 0 if server.engine.status is None else len(server.engine.status.workers)
    if not 1 <= group.port <= _MOST_PORT:
        raise invalid(f"master_port must be 1 to {_MOST_PORT}, got {group.port}", "master_port")
    if not group.address or len(group.address) > _LONGEST_NAME:
        raise invalid(f"master_address must name a host, got {shown(group.address)}", "master_address")
    if not 2 <= group.world_size <= _MOST_WORLD:
        raise invalid(f"world_size must be 2 to {_MOST_WORLD}, got {group.world_size}", "world_size")
    if group.rank < 1:
        raise invalid(
            f"rank_offset must be at least 1, got {group.rank}: rank 0 is the trainer's, at whose address all meet",
            "rank_offset",
        )
    if group.rank > group.world_size - max(1, workers):
        raise invalid(
            f"rank_offset {group.rank} with world_size {group.world_size} leaves no ranks for {workers} model workers",
            "rank_offset",
        )
    return await ask(server, WeightsAction.JOIN, group=group)


def on_cuda(server: ServerState) -> bool:
    """Whether the model's workers are on CUDA devices."""
    status = server.engine.status
    return status is not None and any(worker.device.startswith("cuda") for worker in status.workers)


def default_backend(server: ServerState) -> str:
    """The backend of torch.distributed for a group whose trainer names none."""
    return "nccl" if on_cuda(server) else "gloo"


async def leave(server: ServerState, name: str) -> WeightsAnswer:
    """Has every worker leave a group."""
    return await ask(server, WeightsAction.LEAVE, group=GroupSpec(name))


async def finish(server: ServerState, version: str) -> WeightsAnswer:
    """Serves the tensors that were received and held."""
    return await ask(server, WeightsAction.UPDATE, version=_named(version), running=RunningMode.KEEP)


async def rename(server: ServerState, version: str, abort: bool) -> WeightsAnswer:
    """Gives the version that is served another name; may end all requests first."""
    if not version:
        raise invalid("new_version must not be empty", "new_version")
    name = _named(version)
    if abort:
        await pausing.order(server, Action.ABORT, [pausing.EVERY_REQUEST])
    return await ask(server, WeightsAction.RENAME, version=name)


async def release(server: ServerState, tags: Sequence[str], mode: str) -> WeightsAnswer:
    """Gives memory back, with one of `pausing.MODES` for running requests. They and new ones wait for the memory.

    A release that is refused changes nothing.
    """
    was_paused = pausing.is_paused(server)
    if mode == "wait":
        await pausing.pause(server, mode)
    try:
        # No step runs without the memory, so that nothing else need be paused.
        answer = await ask(server, WeightsAction.RELEASE, tags=list(tags))
    finally:
        if mode == "wait" and not was_paused:
            await pausing.go_on(server)
    if mode == "abort":
        await pausing.order(server, Action.ABORT, [pausing.EVERY_REQUEST])
    return answer


async def ask(server: ServerState, action: int, **fields: Any) -> WeightsAnswer:
    """Sends an order about weights. Raises RequestFailed where it is not carried out, with the scheduler's reason."""
    try:
        answer = await server.engine.questions.weights(action, **fields)
    except NotSent as error:
        raise _NotTaken(_unavailable(str(error))) from None
    except TimeoutError as error:
        raise _unavailable(str(error)) from None
    if answer.refused and answer.unavailable:
        raise _unavailable(answer.refused)
    if answer.refused:
        raise invalid(answer.refused)
    return answer


class _NotTaken(RequestFailed):
    """The order did not leave this process, so its files are still this process's."""

    def __init__(self, failed: RequestFailed) -> None:
        super().__init__(failed.kind, failed.message, retry_after=failed.retry_after)
        self.failed = failed


def _unavailable(reason: str) -> RequestFailed:
    text = reason or "the scheduler does not answer"
    return RequestFailed(ErrorKind.UNAVAILABLE, text, retry_after=RETRY_AFTER_SECONDS)


def _named(version: str) -> str:
    if len(version) > _LONGEST_NAME or not version.isprintable():
        raise invalid(
            f"weight_version must have at most {_LONGEST_NAME} printable characters, got {shown(version)}",
            "weight_version",
        )
    return version


async def _written(folder: Path, texts: Sequence[str]) -> list[str]:
    """Writes the files of a request, all of them or none, and returns their paths."""
    paths: list[str] = []
    given_up = threading.Event()
    try:
        for text in texts:
            data = await asyncio.to_thread(safetensors_of, text, "serialized_named_tensors")
            path = folder / f"{secrets.token_hex(8)}.safetensors"
            paths.append(str(path))
            await asyncio.to_thread(_write, path, data, given_up)
    except BaseException:
        given_up.set()
        _remove(paths)
        raise
    return paths


def _write(path: Path, data: bytes, given_up: threading.Event) -> None:
    """Writes a file for this server's user only. It removes the file if its request was given up meanwhile: a thread
    goes on when the request that waits for it is cancelled."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink(missing_ok=True)
        text = f"the tensors cannot be written to {path.parent}: {error.strerror}"
        raise RequestFailed(ErrorKind.UNAVAILABLE, text, retry_after=RETRY_AFTER_SECONDS) from None
    if given_up.is_set():
        path.unlink(missing_ok=True)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)
