"""Who sends: this server's name and version."""

from __future__ import annotations

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

from api_server.release import release
from api_server.tracing import names


def resource() -> Resource:
    """The name and version, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give others."""
    given = Resource.create()
    named = not str(given.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
    return given if named else given.merge(Resource({SERVICE_NAME: names.SCOPE, SERVICE_VERSION: release()}))
