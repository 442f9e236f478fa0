"""Adapters that operators load and unload while the model runs: names, paths and files are checked, the scheduler acts.

Every dialect's routes call these functions. Knows folders and uploads; knows neither routes nor what an adapter's
tensors mean.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from api_server.engine.questions import NotSent
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid, shown
from api_server.state import ServerState
from interfaces import AdapterAnswer, LoRAOperation, LoRARequest, LoRAStatus
from shared.adapter_paths import ANY_MODEL, CONFIG_FILE, WEIGHTS_FILE, confined, folders_of, is_name

# Seconds between two looks at whether an adapter's requests have ended.
_POLL_SECONDS = 0.05
# The orders with files that are under way: the event loop itself forgets tasks.
_orders: set[asyncio.Task[AdapterAnswer]] = set()
# Bytes of the number with which a safetensors file begins: the length of its header.
_LENGTH_BYTES = 8


async def load(
    server: ServerState, name: str, path: str, *, pinned: bool = False, replace: bool = False
) -> AdapterAnswer:
    """Loads an adapter from a folder below those of the setting `lora_dirs`.

    Raises RequestFailed for a name or a path that cannot be used, and where the scheduler does not answer.
    """
    _check_name(server, name)
    folders = folders_of(server.settings.lora_dirs)
    if not folders:
        raise invalid(
            "lora_path: this server loads no adapters by their paths; start it with --lora-dirs DIR, below which they "
            "may lie, or name adapters at the start with --lora NAME=FOLDER",
            "lora_path",
        )
    try:
        folder = await asyncio.to_thread(confined, path, folders)
    except FileNotFoundError as error:
        return AdapterAnswer(0, 0, LoRAStatus.LOAD_INVALID_PATH, str(error))
    except ValueError as error:
        raise invalid(f"lora_path: {error}", "lora_path") from None
    request = LoRARequest(LoRAOperation.LOAD, name, str(folder))
    return await _answer(server.engine.questions.adapter(request, pinned, replace))


async def load_files(
    server: ServerState, name: str, config: Mapping[str, Any], weights: bytes, *, pinned: bool = False
) -> AdapterAnswer:
    """Loads an adapter from its config and the bytes of its safetensors file. Raises as `load` does.

    The files are the scheduler's once it has the order: it may carry it out although nothing waits here for the answer.
    When the client leaves, the order goes on to its end, so that the files of one that failed are removed.
    """
    _check_name(server, name)
    order = asyncio.create_task(_load_written(server, name, config, weights, pinned))
    _orders.add(order)
    order.add_done_callback(_end)
    return await asyncio.shield(order)


def _end(order: asyncio.Task[AdapterAnswer]) -> None:
    """Forget an order that has ended, and its error, which its client may have left."""
    _orders.discard(order)
    if not order.cancelled():
        order.exception()


async def _load_written(
    server: ServerState, name: str, config: Mapping[str, Any], weights: bytes, pinned: bool
) -> AdapterAnswer:
    folder = await asyncio.to_thread(_write, server.uploaded_adapters, config, weights)
    request = LoRARequest(LoRAOperation.LOAD, name, str(folder))
    try:
        answer = await server.engine.questions.adapter(request, pinned)
    except TimeoutError as error:
        if isinstance(error, NotSent):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise _unanswered(error) from None
    if answer.status is not LoRAStatus.SUCCESS:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return answer


async def unload(server: ServerState, name: str) -> AdapterAnswer:
    """Takes an adapter's name away at once. The requests that use it go on. Raises RequestFailed as `load` does."""
    return await _answer(server.engine.questions.adapter(LoRARequest(LoRAOperation.UNLOAD, name)))


async def wait_until_gone(server: ServerState, handle: int, seconds: float) -> int:
    """Waits for the end of an unloaded adapter's requests. Returns how many are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        status = server.engine.status
        left = [one.requests for one in status.adapters if one.handle == handle] if status is not None else []
        if not sum(left) or time.monotonic() >= deadline:
            return sum(left)
        await asyncio.sleep(_POLL_SECONDS)


def safetensors_of(text: str, field: str) -> bytes:
    """The bytes of a safetensors file in base64. Raises RequestFailed for anything else; pickles are never read."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{field} must be a safetensors file in base64, got {shown(text)}", field) from None
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > len(data) - _LENGTH_BYTES or data[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise invalid(
            f"{field} must be a safetensors file in base64 (safetensors.torch.save); pickles can run code and are "
            "never read",
            field,
        )
    return data


def _check_name(server: ServerState, name: str) -> None:
    if not is_name(name):
        raise invalid(
            f"lora_name must have 1 to 128 letters, digits and ._:/- only, got {shown(name)}: choose another",
            "lora_name",
        )
    if name in ANY_MODEL:
        raise invalid(f"lora_name {name!r} means any model in a request: choose another", "lora_name")
    taken = [own for state in server.models for own in (state.model_name, state.settings.model)]
    others = [own for state in server.models if state is not server for own in state.adapters]
    if name in (*taken, *others):
        raise invalid(f"lora_name {name!r} is the name of another model of this server: choose another", "lora_name")


async def _answer(asked: Awaitable[AdapterAnswer]) -> AdapterAnswer:
    try:
        return await asked
    except TimeoutError as error:
        raise _unanswered(error) from None


def _unanswered(error: TimeoutError) -> RequestFailed:
    reason = str(error) or "the scheduler does not answer"
    return RequestFailed(ErrorKind.UNAVAILABLE, reason, retry_after=RETRY_AFTER_SECONDS)


def _write(parent: Path | None, config: Mapping[str, Any], weights: bytes) -> Path:
    """Writes an adapter's two files into a new folder of the run directory, for this server's user only."""
    if parent is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "this server has no run directory for adapters that are sent to it")
    folder = parent / secrets.token_hex(8)
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        for name, data in ((CONFIG_FILE, json.dumps(dict(config)).encode()), (WEIGHTS_FILE, weights)):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        text = f"the adapter cannot be written to {folder.parent}: {error.strerror}"
        raise RequestFailed(ErrorKind.UNAVAILABLE, text, retry_after=RETRY_AFTER_SECONDS) from None
    # Workers follow no link on the way, and the run directory may lie behind one.
    return folder.resolve()
