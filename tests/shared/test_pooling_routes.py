"""Which modules a Router gives the texts of each kind, in the order of sentence-transformers' own rules."""

from __future__ import annotations

from typing import Any

import pytest

from shared.pooling_routes import read_router


def router(*routes: str, **parameters: Any) -> dict[str, Any]:
    return {
        "types": {f"{route}_0_Dense": "sentence_transformers.models.Dense" for route in routes},
        "structure": {route: [f"{route}_0_Dense"] for route in routes},
        "parameters": parameters,
    }


@pytest.mark.parametrize(
    ("config", "default", "kinds"),
    [
        (router("query", "document"), "query", {"query": "query", "document": "document"}),
        (
            router("query", "document", default_route="document"),
            "document",
            {"query": "query", "document": "document"},
        ),
        (
            router("q", "d", route_mappings={"('query', 'text')": "q", "('document', None)": "d"}),
            "q",
            {"query": "q", "document": "d", "q": "q", "d": "d"},
        ),
        (router("a", "b", route_mappings={"(None, 'text')": "b", "('query', None)": "a"}), "b", {"query": "a"}),
        (router("image", "text"), "text", {"image": "image", "text": "text"}),
    ],
)
def test_routes_of_kinds(config: dict[str, Any], default: str, kinds: dict[str, str]) -> None:
    found = read_router(config, "router_config.json")
    assert found.default == default
    assert found.kinds == kinds
    assert set(found.modules.values()) == {"Dense"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": []}, "must have the objects types and structure"),
        ({"structure": {}}, "must have the objects types and structure"),
        ({"structure": {"query": ["missing"]}}, "names 'missing', which types does not have"),
        ({"structure": {"query": "text"}}, "names 'text', which types does not have"),
        ({"parameters": {"default_route": "other"}}, "route 'other' is none of structure's: query"),
        ({"parameters": {"route_mappings": {"query": "query"}}}, "write one like"),
        ({"parameters": {"route_mappings": {"('query', 'text')": "gone"}}}, "route 'gone' is none of structure's"),
    ],
)
def test_wrong_files_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_router({**router("query"), **change}, "router_config.json")
