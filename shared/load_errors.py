"""Why a process cannot start: which file of the model is broken, and whether a setting or the machine is at fault.

Libraries that load models say what they did not understand, and often not where; and they raise the same error for a
name that does not exist and for a network that is down.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

# Errors of the machine: the same call may work later.
_PASSING = frozenset(
    (errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENODEV, errno.ESTALE)
)
# Names of the exceptions by which HTTP clients and huggingface_hub report that a host cannot be reached.
_NETWORK = frozenset(("TransportError", "ConnectionError", "LocalEntryNotFoundError", "TimeoutError"))


def may_pass(error: BaseException) -> bool:
    """Whether a later start may fare better with the same settings."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _PASSING)
        or any(kind.__name__ in _NETWORK for kind in type(cause).__mro__)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def broken_file(model: str) -> str:
    """Name the first file of a model's folder that cannot be read, and the reason; empty when all can, or for a hub
    name."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    checks = ((path, _check_json if path.suffix == ".json" else _check_weights) for path in sorted(folder.iterdir()))
    for path, check in checks:
        if path.suffix in (".json", ".safetensors"):
            try:
                check(path)
            except (OSError, ValueError) as error:
                return f"{path}: {error}"
    return ""


def _check_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _check_weights(path: Path) -> None:
    """Check that the file is as long as its header says (the safetensors format; the numbers themselves are not
    read)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size:
            raise ValueError(f"it has {size} bytes, too few for its header; was it copied to the end?")
        header = json.loads(file.read(length))
    ends = (value["data_offsets"][1] for name, value in header.items() if name != "__metadata__")
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ValueError(f"it has {size} bytes and should have {wanted}; was it copied to the end?")
