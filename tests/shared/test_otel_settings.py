"""OpenTelemetry's variables: what switches traces on, and what is refused with a remedy."""

from __future__ import annotations

import pytest

from shared import otel_settings
from shared.otel_settings import OtelMetricsSettings, OtelSettings
from shared.setting_checks import SettingsError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_settings, "_PACKAGES", ("json",))


@pytest.mark.parametrize(
    "environ",
    [
        *({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, ENDPOINT | {"OTEL_SDK_DISABLED": "true"}),
        *(ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}),
    ],
)
def test_without_an_exporter_there_are_no_traces(environ: dict[str, str]) -> None:
    assert OtelSettings.of(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        *(ENDPOINT, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/y"}, {"OTEL_TRACES_EXPORTER": "otlp"}),
        ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        ENDPOINT | {"OTEL_TRACES_SAMPLER": "ParentBased_TraceIdRatio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
        ENDPOINT | {"OTEL_TRACES_SAMPLER": "always_on", "OTEL_TRACES_SAMPLER_ARG": "of another sampler"},
        ENDPOINT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "2.5", "OTEL_TRACES_SAMPLER": ""},
    ],
)
def test_an_exporter_switches_them_on(environ: dict[str, str]) -> None:
    assert OtelSettings.of(environ) == OtelSettings()


def test_the_variables_of_the_batch_processor() -> None:
    environ = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "7",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental",
    }
    assert OtelSettings.of(ENDPOINT | environ) == OtelSettings(7, 3, 0.25, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_BSP_SCHEDULE_DELAY", "1.5"), ("OTEL_TRACES_EXPORTER", "zipkin")),
        *(("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")),
        *(("OTEL_EXPORTER_OTLP_ENDPOINT", "x:4318"), ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://x")),
        *(("OTEL_TRACES_SAMPLER", "parentbased_traceidratoi"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "10s")),
        *(("OTEL_EXPORTER_OTLP_TIMEOUT", "0"), ("OTEL_TRACES_SAMPLER_ARG", "5%"), ("OTEL_TRACES_SAMPLER_ARG", "nan")),
        *(("OTEL_TRACES_SAMPLER_ARG", "-0.1"), ("OTEL_TRACES_SAMPLER_ARG", "1.5")),
    ],
)
def test_what_cannot_work_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be .*'{value}'"):
        OtelSettings.of(ENDPOINT | {"OTEL_TRACES_SAMPLER": "traceidratio"} | {name: value})


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_settings, "_PACKAGES", ("no_such_package.at_all",))
    with pytest.raises(SettingsError, match=r"no_such_package.at_all is missing: install tokenyard\[otel\]"):
        OtelSettings.of(ENDPOINT)
    assert OtelSettings.of({}) is None
    with pytest.raises(SettingsError, match=r"asks for metrics .* set OTEL_METRICS_EXPORTER=none"):
        OtelMetricsSettings.of({"OTEL_METRICS_EXPORTER": "otlp"})


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        (ENDPOINT, None),
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, None),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, None),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "otlp"}, 60.0),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x", "OTEL_METRIC_EXPORT_INTERVAL": "5000"}, 5.0),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip"}, 60.0),
    ],
)
def test_metrics_want_a_word_of_their_own(environ: dict[str, str], interval: float | None) -> None:
    found = OtelMetricsSettings.of(environ)
    assert (None if found is None else found.interval) == interval


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "x:4318"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "x:4318"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sums"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "buckets"),
    ],
)
def test_metrics_that_cannot_be_sent_are_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be .*'{value}'"):
        OtelMetricsSettings.of({"OTEL_METRICS_EXPORTER": "otlp", name: value})


def test_metrics_alone_follow_the_names_of_traces() -> None:
    environ = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"}
    assert OtelMetricsSettings.of(environ) == OtelMetricsSettings(latest_names=True)


def test_a_signals_own_protocol_goes_before_that_of_all() -> None:
    environ = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    own = {f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL": "http/protobuf" for signal in ("TRACES", "METRICS")}
    assert OtelMetricsSettings.of(environ | own) == OtelMetricsSettings()
    assert OtelSettings.of(ENDPOINT | environ | own) == OtelSettings()
