"""starlette's router, which looks a path without parameters up instead of trying the pattern of each route.

A server has many routes, and trying them one by one took a tenth of a short request's time. Knows no route.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send


class DirectRouter(Router):
    """Finds the same routes as `Router`, in the same order of precedence."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        super().__init__(routes, redirect_slashes=False)
        self._direct: dict[tuple[str, str], Route] = {}
        known = [route for route in routes if isinstance(route, Route)]
        for path in {route.path for route in known if not route.param_convertors}:
            for route in reversed(known):
                if route.path_regex.match(path) and not route.param_convertors:
                    self._direct.update({(method, path): route for method in route.methods or ()})
                elif route.path_regex.match(path):
                    # A route with parameters that comes first takes the path, as it would in its turn.
                    for method in route.methods or ():
                        self._direct.pop((method, path), None)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        route = None
        if scope["type"] == "http" and not scope.get("root_path"):
            route = self._direct.get((scope["method"], scope["path"]))
        if route is None:
            await super().app(scope, receive, send)
            return
        scope.setdefault("router", self)
        scope["route"] = route
        scope["endpoint"] = route.endpoint
        scope["path_params"] = {}
        await route.handle(scope, receive, send)
