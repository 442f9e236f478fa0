"""A checkpoint's modules as sentence-transformers' files list them, and the reading of such files.

Knows modules.json and a Router's file; does not know what modules do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.json_files import read_json_file
from shared.pooling_routes import ROUTERS, read_router

# The modules of one kind of text, in order.
Modules = tuple["PoolingModule", ...]


@dataclass(frozen=True)
class PoolingModule:
    """An entry of modules.json: the last part of its type, its folder, and that folder's config.json."""

    kind: str
    path: str
    config: Mapping[str, Any]


def read_modules(source: str | Path) -> tuple[Modules, dict[str, Modules]]:
    """Return the modules of modules.json, and those of each kind of text if a Router chooses among them.

    There are none without such a file. ValueError names what is wrong.
    """
    found = json_of(source, "modules.json")
    if found is not None and not isinstance(found, list):
        raise ValueError(f"modules.json of {source} must be a list of modules, not {type(found).__name__}")
    return _routed(source, tuple(_module(source, entry) for entry in found or ()))


def is_transformer(module: PoolingModule) -> bool:
    """Whether a module is the transformer itself."""
    return module.kind in ("Transformer", "MLMTransformer")


def path_of_transformer(modules: Iterable[PoolingModule], routes: Mapping[str, Modules]) -> str:
    """Return the transformer's folder, which has its config and tokenizer: the root, or one such as 0_Transformer."""
    every = (module for some in (modules, *routes.values()) for module in some)
    return next((module.path for module in every if is_transformer(module)), "")


def file_of(source: str | Path, name: str) -> Path | None:
    """Return the path of a checkpoint's file, fetched first from the hub if need be; None when there is none."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)


def object_of(source: str | Path, name: str) -> dict[str, Any]:
    """Return what a JSON file says; empty when there is no such file."""
    found = json_of(source, name)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{name} of {source} must be a JSON object, not {type(found).__name__}")
    return found or {}


def json_of(source: str | Path, name: str) -> Any:
    """Return what a JSON file holds; None when there is no such file. ValueError for one that cannot be read."""
    path = file_of(source, name)
    if path is None:
        return None
    try:
        return read_json_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; copy the file again") from error


def join(folder: str, name: str) -> str:
    """Return the name of a file in a folder of a checkpoint, which may be its root."""
    return f"{folder}/{name}" if folder else name


def _module(source: str | Path, entry: Any) -> PoolingModule:
    if not isinstance(entry, dict) or "type" not in entry:
        raise ValueError(f"modules.json of {source} has an entry without a type: {entry!r}")
    path = str(entry.get("path", ""))
    kind = str(entry["type"]).rpartition(".")[2]
    config = {} if path == "" else object_of(source, f"{path}/config.json")
    return PoolingModule(kind, path, config)


def _routed(source: str | Path, modules: Modules) -> tuple[Modules, dict[str, Modules]]:
    """Return the modules of texts whose kind is not said, and those of each kind if one of `modules` is a Router."""
    places = [i for i, module in enumerate(modules) if module.kind in ROUTERS]
    if not places:
        return modules, {}
    if len(places) > 1:
        raise ValueError(f"modules.json of {source} has {len(places)} Router modules, and one is possible")
    at = places[0]
    folder = modules[at].path
    config = object_of(source, join(folder, "router_config.json")) or modules[at].config
    router = read_router(config, f"{join(folder, 'router_config.json')} of {source}")
    inside = {
        path: PoolingModule(kind, join(folder, path), object_of(source, join(folder, f"{path}/config.json")))
        for path, kind in router.modules.items()
    }

    def whole(route: str) -> Modules:
        return (*modules[:at], *(inside[path] for path in router.routes[route]), *modules[at + 1 :])

    routes = {kind: whole(route) for kind, route in router.kinds.items()}
    usual = whole(router.default)
    folders = {module.path for route in (usual, *routes.values()) for module in route if is_transformer(module)}
    if len(folders) > 1:
        raise ValueError(
            f"modules.json of {source}: texts of different kinds go through {len(folders)} transformers "
            f"({', '.join(sorted(folders))}), and one is possible: serve each by itself"
        )
    return usual, routes
