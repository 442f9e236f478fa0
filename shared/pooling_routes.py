"""sentence-transformers' Router (once Asym): which modules a text goes through, by its kind ("query", "document").

Reads the object of its router_config.json. Knows no files.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The names of such modules.
ROUTERS = ("Router", "Asym")
# Modules that look up what they give for a token, and need no transformer before them.
STATIC = "SparseStaticEmbedding"
# Kinds of texts that clients name, beside those that a router has modules for.
_KINDS = ("query", "document")
_TEXT = "text"

_Key = tuple[str | None, str | tuple[str, ...] | None]


@dataclass(frozen=True)
class Router:
    """`modules` are the kinds of modules, by their folders; `routes` the folders that a text goes through, in order."""

    modules: Mapping[str, str]
    routes: Mapping[str, tuple[str, ...]]
    # Routes by kind of text and by modality; None stands for all of them.
    mappings: Mapping[_Key, str]
    usual: str | None

    @property
    def default(self) -> str:
        """The route of texts whose kind is not said."""
        for key in ((None, _TEXT), (None, None)):
            if key in self.mappings:
                return self.mappings[key]
        return _TEXT if _TEXT in self.routes else self.usual or next(iter(self.routes))

    @property
    def kinds(self) -> dict[str, str]:
        """The routes of kinds of texts that have one of their own, by kind."""
        named = [kind for kind, _ in self.mappings if kind is not None]
        found = {kind: self._own(kind) for kind in dict.fromkeys((*_KINDS, *named, *self.routes))}
        return {kind: route for kind, route in found.items() if route is not None}

    def _own(self, kind: str) -> str | None:
        for key in ((kind, _TEXT), (kind, None)):
            if key in self.mappings:
                return self.mappings[key]
        for_all = (None, _TEXT) in self.mappings or (None, None) in self.mappings
        return kind if kind in self.routes and not for_all else None


def read_router(config: Mapping[str, Any], where: str) -> Router:
    """Return what a router's file says. ValueError names the field that is wrong; `where` is the file, for errors."""
    types = config.get("types")
    structure = config.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict) or not structure:
        raise ValueError(f"{where} must have the objects types and structure: save the model again")
    modules = {str(folder): str(kind).rpartition(".")[2] for folder, kind in types.items()}
    routes: dict[str, tuple[str, ...]] = {}
    for name, folders in structure.items():
        unknown = [folder for folder in folders if folder not in modules] if isinstance(folders, list) else [folders]
        if unknown:
            raise ValueError(f"{where}: structure of route {name!r} names {unknown[0]!r}, which types does not have")
        routes[str(name)] = tuple(folders)
    parameters = config.get("parameters") or {}
    mappings = {_key(key, where): str(route) for key, route in (parameters.get("route_mappings") or {}).items()}
    usual = parameters.get("default_route")
    for route in (*mappings.values(), *([] if usual is None else [str(usual)])):
        if route not in routes:
            raise ValueError(f"{where}: route {route!r} is none of structure's: {', '.join(routes)}")
    return Router(modules, routes, mappings, None if usual is None else str(usual))


def _key(text: str, where: str) -> _Key:
    """The kind and the modality of `('query', 'text')`, which is how a file writes them."""
    try:
        kind, modality = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{where}: route_mappings has the key {text!r}; write one like ('query', 'text')") from None
    return kind, modality
