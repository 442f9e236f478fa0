"""Why a process cannot start: which file of the model is broken, and whether a setting or the machine is at fault.

Libraries that load models say what they did not understand, and often not where; and they raise the same error for a
name that does not exist and for a network that is down.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shared.json_files import parse_json, read_json_file

# Errors of the machine: the same call may work later.
_PASSING = frozenset(
    (errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENODEV, errno.ESTALE)
)
# Names of the exceptions by which HTTP clients and huggingface_hub report that a host cannot be reached.
_NETWORK = frozenset(("TransportError", "ConnectionError", "LocalEntryNotFoundError", "TimeoutError"))
# The beginning of a file that stands for one in git's large file storage.
_POINTER = b"version https://git-lfs.github.com/spec/"
# Bytes of the longest header of a safetensors file, by the format.
_LONGEST_HEADER = 100_000_000


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
            except (OSError, ValueError, LookupError, TypeError) as error:
                return f"{path}: {error}"
    return ""


def missing_weights(folder: Path) -> str:
    """Say what a folder without weights in safetensors has in their place, and what to do."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def some(*ends: str) -> str:
        return ", ".join([name for name in names if name.endswith(ends)][:3])

    if "adapter_config.json" in names:
        base = _base_of(folder / "adapter_config.json")
        return f"it is an adapter (adapter_config.json: LoRA or the like) and no model; serve its base {base}".strip()
    if found := some(".gguf"):
        return f"it has no model.safetensors, only GGUF ({found}); serve that file itself, or download the safetensors"
    if "params.json" in names or (found := some("consolidated.safetensors")):
        return (
            "its weights are in Mistral's own format (consolidated.safetensors, params.json); download the "
            "model.safetensors and config.json of the repository, or convert it with transformers"
        )
    if found := some(".bin", ".pt", ".pth", ".ckpt"):
        return (
            f"it has no model.safetensors, only pickles ({found}), which can run code and are never read; convert them "
            "to safetensors, or look for a revision that has them"
        )
    if found := some(".onnx", ".h5", ".msgpack"):
        return f"it has no model.safetensors, only {found}, which cannot be read here; download the safetensors"
    return "it has no model.safetensors (nor model.safetensors.index.json); download all files of the repository"


def _base_of(path: Path) -> str:
    try:
        return str(read_json_file(path)["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _refuse_pointer(path: Path) -> None:
    """ValueError for a file that git-lfs has not fetched."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError("it is a git-lfs pointer, not the file itself: run git lfs pull in the repository")


def _check_json(path: Path) -> None:
    _refuse_pointer(path)
    read_json_file(path)


def _check_weights(path: Path) -> None:
    """Check that the file is as long as its header says (the safetensors format; the numbers themselves are not
    read)."""
    _refuse_pointer(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size:
            raise ValueError(f"it has {size} bytes, too few for its header; was it copied to the end?")
        if length > _LONGEST_HEADER:
            raise ValueError(f"it says that its header has {length} bytes; {_LONGEST_HEADER} are allowed: get it anew")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object; download it anew")
    ends = (value["data_offsets"][1] for name, value in header.items() if name != "__metadata__")
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ValueError(f"it has {size} bytes and should have {wanted}; was it copied to the end?")
