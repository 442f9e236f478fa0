"""What is known of a file and of a batch, and their names."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from api_server.batches import disk

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")

ACTIVE = ("validating", "in_progress", "finalizing")


@dataclass(frozen=True)
class StoredFile:
    """The facts of a file. Times are Unix seconds."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True)
class Batch:
    """The facts of a batch. `dialect` is the one whose routes show it."""

    id: str
    tenant: str
    dialect: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = "validating"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    # Requests: all, those with an answer, and those with an error, which may be cancelled or expired.
    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    # When a status was reached.
    times: dict[str, int] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return self.status in ACTIVE

    def became(self, status: str, **changes: Any) -> Batch:
        """The batch with a new status, and its time."""
        return replace(self, status=status, times={**self.times, status: int(time.time())}, **changes)


def new_file_id() -> str:
    return _new_id("file-")


def new_batch_id(prefix: str) -> str:
    return _new_id(prefix)


def file_id_of(batch: Batch, part: str) -> str:
    """The id of a file that a batch makes: the same at each attempt."""
    digits = batch.id[-32:]
    return f"file-{digits[:-1]}{'0' if part == 'output' else '1'}"


def is_id(text: str) -> bool:
    """True for what may be the name of a file or batch; nothing else becomes part of a path."""
    return _ID.fullmatch(text) is not None


def read_file(path: Path) -> StoredFile | None:
    """The facts of a file; None where they are gone, or broken."""
    with contextlib.suppress(ValueError, TypeError):
        facts = disk.read(path)
        return StoredFile(**facts) if facts else None
    return None


def _new_id(prefix: str) -> str:
    """An id that cannot be guessed. Those of one second sort by the time at which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"
