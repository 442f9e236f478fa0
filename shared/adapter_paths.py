"""Names and folders of adapters: those of the settings, and the folders from which a running server may load more.

Knows paths. Does not know what is in an adapter's files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath

# Names of adapters: no space, no quote, nothing that a shell or a log line could take for something else.
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}", re.ASCII)
# Names that clients send when they accept any model (huggingface_hub sends tgi or dummy).
ANY_MODEL = ("", "default", "tgi", "dummy")
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# A pickle: reading it runs the code in it.
_PICKLE_FILE = "adapter_model.bin"


def is_name(text: str) -> bool:
    """Return whether an adapter can have this name."""
    return _NAME.fullmatch(text) is not None


def named_paths(text: str) -> dict[str, str]:
    """Read `NAME=PATH,NAME=PATH`. ValueError says what a part lacks."""
    found: dict[str, str] = {}
    for entry in (part.strip() for part in text.split(",") if part.strip()):
        name, separator, path = (part.strip() for part in entry.partition("="))
        if not separator or not path or not is_name(name):
            raise ValueError(f"a list of NAME=PATH (names have letters, digits and ._:/-, at most 128), got {entry!r}")
        if name in ANY_MODEL:
            raise ValueError(f"a list of NAME=PATH with other names than {name!r}, which means any model in a request")
        if name in found:
            raise ValueError(f"a list with a name of its own for each adapter, got {name!r} twice")
        found[name] = path
    return found


def folders_of(text: str) -> list[Path]:
    """Read `DIR,DIR`."""
    return [Path(part.strip()).expanduser() for part in text.split(",") if part.strip()]


def check_files(folder: Path, links: bool = False) -> None:
    """Check that a folder has the files of an adapter, and unless `links` may be, that they are none.

    Raises FileNotFoundError, or ValueError for files that are never read.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        mode = _mode(folder / name, links)
        if mode is None and name == WEIGHTS_FILE and _mode(folder / _PICKLE_FILE) is not None:
            raise ValueError(
                f"{folder} has its weights in {_PICKLE_FILE}, a pickle, which may run code: save them anew"
            )
        if mode is None:
            raise FileNotFoundError(f"there is no adapter in {folder}: it has no {name}")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{folder / name} is not a regular file: links and others are not followed")


def confined(path: str, folders: Sequence[Path]) -> Path:
    """Return the real folder of an adapter that a caller names by `path`, which must be below one of `folders`.

    A relative path counts from each of them. No link is followed below them. Raises FileNotFoundError where there is no
    adapter, and ValueError for a path that leads elsewhere.
    """
    asked = PurePath(path)
    if "\0" in path or ".." in asked.parts:
        raise ValueError(f"{path!r:.200} is no path below the folders of lora_dirs: it must have neither .. nor NUL")
    candidates = [place for folder in folders if (place := _below(asked, folder)) is not None]
    if not candidates:
        allowed = ", ".join(str(folder) for folder in folders) or "none"
        raise ValueError(f"{path!r:.200} is not below a folder of lora_dirs (the server has: {allowed})")
    found = next((place for place in candidates if _mode(place) is not None), None)
    if found is None:
        raise FileNotFoundError(f"there is no adapter at {path!r:.200}")
    check_files(found)
    return found


def _below(asked: PurePath, folder: Path) -> Path | None:
    """The place of `asked` below `folder`, or None. ValueError where a link or a file is in the way."""
    real = folder.resolve()
    for base in (folder.absolute(), real):
        if not asked.is_absolute() or asked.is_relative_to(base):
            parts = asked.relative_to(base).parts if asked.is_absolute() else asked.parts
            break
    else:
        return None
    if not parts:
        raise ValueError(
            f"{os.fspath(asked)!r:.200} is a folder of lora_dirs itself: name an adapter's folder below it"
        )
    place = real
    for part in parts:
        place = place / part
        mode = _mode(place)
        if mode is not None and not stat.S_ISDIR(mode):
            raise ValueError(
                f"{os.fspath(asked)!r:.200} leads through {part!r}, which is no folder: no link is followed"
            )
    return place


def _mode(path: Path, links: bool = False) -> int | None:
    """The kind of a file, of a link itself unless `links` are followed; None where nothing is."""
    try:
        return path.stat(follow_symlinks=links).st_mode
    except (OSError, ValueError):
        return None
