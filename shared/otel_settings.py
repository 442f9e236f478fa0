"""OpenTelemetry's own environment variables, as far as traces and metrics of this server follow them.

There are no flags beside them: an endpoint in the environment switches traces on, as in other programs. Metrics want a
word of their own, because /metrics has them already, and many collectors of traces take no metrics. Endpoint, headers,
certificates, compression and timeouts are read by the exporter itself, and the sampler and the resource by the SDK.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from shared.setting_checks import SettingsError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
_OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
_LATEST = "gen_ai_latest_experimental"
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_SAMPLER = "OTEL_TRACES_SAMPLER"
_RATIO = "OTEL_TRACES_SAMPLER_ARG"
# The samplers that the SDK knows; those of a ratio read it from another variable.
_SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True)
class OtelSettings:
    """How spans leave. Defaults are those of OpenTelemetry's batch processor."""

    # Requests that wait for their export; further ones are dropped, and counted.
    most_waiting: int = 2048
    # Requests of one export.
    batch: int = 512
    # Seconds that an ended request waits for others to be exported with.
    delay: float = 5.0
    # Whether attributes have the names of the newest GenAI conventions, where those have changed.
    latest_names: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> OtelSettings | None:
        """Reads the variables. None: no exporter is configured. Raises SettingsError."""
        exporter = environ.get(_EXPORTER, "").strip()
        disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        wanted = exporter == "otlp" or any(environ.get(name, "").strip() for name in _ENDPOINTS)
        if disabled or exporter == "none" or not (wanted or exporter):
            return None
        if exporter not in ("", "otlp"):
            raise SettingsError(f"{_EXPORTER} must be otlp, or none for no traces, got {exporter!r}")
        for name in _PROTOCOLS:
            protocol = environ.get(name, "").strip()
            if protocol not in ("", "http/protobuf"):
                raise SettingsError(
                    f"{name} must be http/protobuf, got {protocol!r}: name the collector's HTTP port, which is 4318 by "
                    f"default, or set {_EXPORTER}=none for no traces"
                )
        _check_values(environ)
        check_packages()
        return cls(
            most_waiting=_whole(environ, "OTEL_BSP_MAX_QUEUE_SIZE", cls.most_waiting),
            batch=_whole(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", cls.batch),
            delay=_whole(environ, "OTEL_BSP_SCHEDULE_DELAY", round(cls.delay * 1000)) / 1000,
            latest_names=_LATEST in (word.strip() for word in environ.get(_OPT_IN, "").split(",")),
        )


@dataclass(frozen=True)
class OtelMetricsSettings:
    """How metrics leave."""

    # Seconds between two exports.
    interval: float = 60.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> OtelMetricsSettings | None:
        """Reads the variables. None: no metrics are sent. Raises SettingsError."""
        exporter = environ.get(_METRICS_EXPORTER, "").strip()
        endpoint = environ.get(_METRICS_ENDPOINT, "").strip()
        disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if disabled or exporter == "none" or not (exporter or endpoint):
            return None
        if exporter not in ("", "otlp"):
            raise SettingsError(f"{_METRICS_EXPORTER} must be otlp, or none for no metrics, got {exporter!r}")
        for name in ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            protocol = environ.get(name, "").strip()
            if protocol not in ("", "http/protobuf"):
                raise SettingsError(f"{name} must be http/protobuf, got {protocol!r}: name the collector's HTTP port")
        _check_url(_METRICS_ENDPOINT, endpoint)
        check_packages()
        return cls(_whole(environ, "OTEL_METRIC_EXPORT_INTERVAL", round(cls.interval * 1000)) / 1000)


def check_packages() -> None:
    """Raises SettingsError when the packages that make and send spans and metrics are missing."""
    for name in _PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise SettingsError(
                f"the environment asks for traces ({' or '.join(_ENDPOINTS)}), and {name} is missing: install "
                f"tokenyard[otel], or set {_EXPORTER}=none"
            )


def _check_values(environ: Mapping[str, str]) -> None:
    """Refuse what the exporter and the SDK would replace by a default, or fail with at each export."""
    for name in _ENDPOINTS:
        _check_url(name, environ.get(name, "").strip())
    for name in _TIMEOUTS:
        seconds = environ.get(name, "").strip()
        if seconds and not 0 < _float(seconds) < float("inf"):
            raise SettingsError(f"{name} must be a number of seconds above 0, got {seconds[:50]!r}")
    sampler = environ.get(_SAMPLER, "").lower()
    if sampler and sampler not in _SAMPLERS:
        raise SettingsError(f"{_SAMPLER} must be one of {', '.join(_SAMPLERS)}, got {sampler[:50]!r}")
    ratio = environ.get(_RATIO, "").strip()
    if ratio and sampler.endswith("traceidratio") and not 0 <= _float(ratio) <= 1:
        raise SettingsError(f"{_RATIO} must be a number from 0 to 1, got {ratio[:50]!r}")


def _check_url(name: str, endpoint: str) -> None:
    if endpoint and not endpoint.lower().startswith(("http://", "https://")):
        raise SettingsError(
            f"{name} must be a URL that begins with http:// or https://, such as http://127.0.0.1:4318, "
            f"got {endpoint[:200]!r}"
        )


def _float(text: str) -> float:
    """The number that a text is, and not a number for any other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
        raise SettingsError(f"{name} must be a whole number from 1 to 1000000000, got {text[:50]!r}")
    return int(text)
