"""The router that looks paths up finds what starlette's router finds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from api_server.web.direct_router import DirectRouter


class Named:
    """An endpoint that says who it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send((self.name, scope["endpoint"] is self, scope["route"].path, scope["path_params"]))


ROUTES = [
    Route("/a", Named("a"), methods=["POST"]),
    Route("/a", Named("a again"), methods=["GET", "POST"]),
    Route("/m/{name:path}", Named("with a name"), methods=["GET"]),
    Route("/m/x", Named("shadowed"), methods=["GET", "POST"]),
    Route("/", Named("root"), methods=["GET"]),
]


def answer(router: Router, method: str, path: str, **scope: Any) -> Any:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def serve() -> None:
        asked = {"type": "http", "method": method, "path": path, "app": None, "headers": [], **scope}
        await router(asked, None, send)  # type: ignore[arg-type]

    try:
        asyncio.run(serve())
    except HTTPException as error:
        return error.status_code, error.headers
    return sent


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/a", "/a/", "/m/x", "/m/y/z", "/m/", "/", "/none"])
def test_each_path_has_the_route_that_starlette_finds(method: str, path: str) -> None:
    expected = answer(Router(ROUTES, redirect_slashes=False), method, path)
    assert answer(DirectRouter(ROUTES), method, path) == expected


def test_behind_a_prefix_paths_are_matched_as_before() -> None:
    plain, direct = Router(ROUTES, redirect_slashes=False), DirectRouter(ROUTES)
    for path in ("/p/a", "/p/m/x", "/a"):
        assert answer(direct, "GET", path, root_path="/p") == answer(plain, "GET", path, root_path="/p")
