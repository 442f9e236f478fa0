"""Finds the GGUF file that a model's name means: a file, a folder with one, or NAME:QUANTIZATION of the hub.

Names of the hub are looked up in its local cache first, and on the hub where there is access to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shared.gguf.file import parts_of
from shared.gguf.format import SUFFIX, GgufError, is_gguf

_TAGGED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+):(?P<tag>[\w.-]+)", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
# Files beside a model that have no model of their own: projectors of images, and matrices of importance.
_OTHERS = ("mmproj", "imatrix")


def find_gguf(model: str) -> str | None:
    """Return the path of the file; None for a model that is none of GGUF. GgufError names what is missing."""
    path = Path(model).expanduser()
    if path.is_file() and is_gguf(path):
        return str(path.absolute())
    if path.is_dir():
        return _in_folder(path)
    if is_gguf(model):
        raise GgufError(f"model {model!r}: there is no such file; give the path of a GGUF file")
    found = _TAGGED.fullmatch(model)
    return None if found is None else _on_hub(found["name"], found["tag"])


def _in_folder(folder: Path) -> str | None:
    """Return the model of a folder, unless it has safetensors, which are served then."""
    if any(folder.glob("*.safetensors")):
        return None
    names = [path.name for path in folder.glob(f"*{SUFFIX}")]
    models = _models(names)
    if not models:
        return None
    if len(models) > 1:
        raise GgufError(f"model {str(folder)!r} has {len(models)} GGUF files; name one of {_listed(folder, models)}")
    return str((folder / models[0]).absolute())


def _models(names: Iterable[str]) -> list[str]:
    """Return the files with models, those of split ones by their first part."""
    found = []
    for name in sorted(names):
        base = name.rpartition("/")[2].lower()
        is_first = not _PART.search(name.removesuffix(SUFFIX)) or "-00001-of-" in name
        if is_first and not any(other in base for other in _OTHERS):
            found.append(name)
    return found


def _choose(where: str, names: Iterable[str], tag: str) -> str:
    """Return the one file whose name has the quantization's name."""
    models = _models(names)
    pattern = re.compile(rf"(^|[-._/]){re.escape(tag)}($|[-./])", re.IGNORECASE)
    found = [name for name in models if name == tag or pattern.search(_PART.sub("", name.removesuffix(SUFFIX)))]
    # A file Q4_K_M is not one of Q4_K, but UD-Q4_K_M beside it is another one of Q4_K_M: the shortest name is meant.
    found.sort(key=len)
    if not found or (len(found) > 1 and len(found[0]) == len(found[1])):
        known = ", ".join(found or models) or "none"
        count = "several" if found else "no"
        raise GgufError(f"model '{where}:{tag}': {count} GGUF files of it are {tag}; name one of these: {known}")
    return found[0]


def _on_hub(name: str, tag: str) -> str:
    # The hub's library is only needed here, and most models are folders.
    from huggingface_hub import constants

    snapshot = _snapshot(Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}")
    if snapshot is not None:
        cached = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(f"*{SUFFIX}")]
        try:
            found = snapshot / _choose(name, cached, tag)
            parts_of(found)
            return str(found)
        except GgufError:
            if constants.HF_HUB_OFFLINE:
                raise
    if constants.HF_HUB_OFFLINE:
        raise GgufError(
            f"model '{name}:{tag}': the cache {constants.HF_HUB_CACHE} has no {name}, and HF_HUB_OFFLINE is set; "
            "download it where there is access to the hub"
        )
    return _download(name, tag)


def _snapshot(folder: Path) -> Path | None:
    """Return the cached files of a repository: of its main branch, else of its newest revision."""
    main = folder / "refs" / "main"
    if main.is_file() and (found := folder / "snapshots" / main.read_text().strip()).is_dir():
        return found
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def _download(name: str, tag: str) -> str:
    from huggingface_hub import hf_hub_download, list_repo_files

    try:
        names = [file for file in list_repo_files(name) if file.endswith(SUFFIX)]
        chosen = _choose(name, names, tag)
        stem = _PART.sub("", chosen.removesuffix(SUFFIX))
        parts = [file for file in sorted(names) if _PART.sub("", file.removesuffix(SUFFIX)) == stem]
        paths = [hf_hub_download(name, file) for file in parts]
    except GgufError:
        raise
    except Exception as error:  # the hub's library raises its own kinds, and those of its HTTP client
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise GgufError(f"model '{name}:{tag}': it is not in the local cache, and the hub says: {reason}") from error
    return paths[0]


def _listed(folder: Path, names: list[str]) -> str:
    return ", ".join(str(folder / name) for name in names)
