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

_OF_ALL = "OTEL_EXPORTER_OTLP"
_OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES"
_OF_METRICS = "OTEL_EXPORTER_OTLP_METRICS"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
_OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
_LATEST = "gen_ai_latest_experimental"
_COMPRESSIONS = ("none", "gzip", "deflate")
_SAMPLER = "OTEL_TRACES_SAMPLER"
_RATIO = "OTEL_TRACES_SAMPLER_ARG"
# The samplers that the SDK knows; those of a ratio read it from another variable.
_SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
# What the names of temporality, and of histograms, may be.
_METRICS_WORDS = {
    f"{_OF_METRICS}_TEMPORALITY_PREFERENCE": ("cumulative", "delta", "lowmemory"),
    f"{_OF_METRICS}_DEFAULT_HISTOGRAM_AGGREGATION": (
        *("explicit_bucket_histogram", "base2_exponential_bucket_histogram"),
    ),
}
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
        wanted = exporter == "otlp" or any(environ.get(f"{of}_ENDPOINT", "").strip() for of in (_OF_TRACES, _OF_ALL))
        if disabled or exporter == "none" or not (wanted or exporter):
            return None
        if exporter not in ("", "otlp"):
            raise SettingsError(f"{_EXPORTER} must be otlp, or none for no traces, got {exporter!r}")
        _check_sending(environ, _OF_TRACES, f"set {_EXPORTER}=none for no traces")
        _check_sampler(environ)
        check_packages("traces", _EXPORTER)
        return cls(
            most_waiting=_whole(environ, "OTEL_BSP_MAX_QUEUE_SIZE", cls.most_waiting),
            batch=_whole(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", cls.batch),
            delay=_whole(environ, "OTEL_BSP_SCHEDULE_DELAY", round(cls.delay * 1000)) / 1000,
            latest_names=_latest_names(environ),
        )


@dataclass(frozen=True)
class OtelMetricsSettings:
    """How metrics leave."""

    # Seconds between two exports.
    interval: float = 60.0
    # As of traces.
    latest_names: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> OtelMetricsSettings | None:
        """Reads the variables. None: no metrics are sent. Raises SettingsError."""
        exporter = environ.get(_METRICS_EXPORTER, "").strip()
        endpoint = environ.get(f"{_OF_METRICS}_ENDPOINT", "").strip()
        disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if disabled or exporter == "none" or not (exporter or endpoint):
            return None
        if exporter not in ("", "otlp"):
            raise SettingsError(f"{_METRICS_EXPORTER} must be otlp, or none for no metrics, got {exporter!r}")
        _check_sending(environ, _OF_METRICS, f"set {_METRICS_EXPORTER}=none for no metrics")
        for name, words in _METRICS_WORDS.items():
            _check_word(environ, name, words)
        check_packages("metrics", _METRICS_EXPORTER)
        interval = _whole(environ, "OTEL_METRIC_EXPORT_INTERVAL", round(cls.interval * 1000)) / 1000
        return cls(interval, _latest_names(environ))


def check_packages(what: str, exporter: str) -> None:
    """Raises SettingsError when the packages that make and send spans and metrics are missing.

    `what` is sent with them; the variable `exporter` switches it off.
    """
    for name in _PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise SettingsError(
                f"the environment asks for {what} ({exporter}, or an OTEL_EXPORTER_OTLP_...ENDPOINT), and {name} is "
                f"missing: install tokenyard[otel], or set {exporter}=none"
            )


def _check_sending(environ: Mapping[str, str], own: str, off: str) -> None:
    """Refuse what the exporter would replace by a default, or fail with at each export.

    `own` begins the names of the variables that go before those of all signals; `off` is how to do without it.
    """
    protocols = {name: environ.get(name, "").strip() for name in (f"{own}_PROTOCOL", f"{_OF_ALL}_PROTOCOL")}
    name, protocol = next(((name, text) for name, text in protocols.items() if text), ("", "http/protobuf"))
    if protocol != "http/protobuf":
        raise SettingsError(
            f"{name} must be http/protobuf, got {protocol[:50]!r}: name the collector's HTTP port, which is 4318 by "
            f"default, or {off}"
        )
    for of in (own, _OF_ALL):
        _check_url(f"{of}_ENDPOINT", environ.get(f"{of}_ENDPOINT", "").strip())
        seconds = environ.get(f"{of}_TIMEOUT", "").strip()
        if seconds and not 0 < _float(seconds) < float("inf"):
            raise SettingsError(f"{of}_TIMEOUT must be a number of seconds above 0, got {seconds[:50]!r}")
        _check_word(environ, f"{of}_COMPRESSION", _COMPRESSIONS)


def _check_word(environ: Mapping[str, str], name: str, words: tuple[str, ...]) -> None:
    word = environ.get(name, "").strip()
    if word and word.lower() not in words:
        raise SettingsError(f"{name} must be one of {', '.join(words)}, got {word[:50]!r}")


def _check_sampler(environ: Mapping[str, str]) -> None:
    """Refuse what the SDK would replace by a default."""
    sampler = environ.get(_SAMPLER, "").lower()
    if sampler and sampler not in _SAMPLERS:
        raise SettingsError(f"{_SAMPLER} must be one of {', '.join(_SAMPLERS)}, got {sampler[:50]!r}")
    ratio = environ.get(_RATIO, "").strip()
    if ratio and sampler.endswith("traceidratio") and not 0 <= _float(ratio) <= 1:
        raise SettingsError(f"{_RATIO} must be a number from 0 to 1, got {ratio[:50]!r}")


def _latest_names(environ: Mapping[str, str]) -> bool:
    return _LATEST in (word.strip() for word in environ.get(_OPT_IN, "").split(","))


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
