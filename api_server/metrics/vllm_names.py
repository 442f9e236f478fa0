"""The figures under vLLM's names, which gateways, autoscalers and dashboards read.

The endpoint picker of the Gateway API Inference Extension takes waiting and running requests, the use of the KV cache,
the size and number of its blocks, and the adapters. A name appears only where its meaning is the same. The label
`model_name` is the served model's, and `engine` is always "0": the figures are those of all workers together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "tokenyard_time_to_first_token_seconds",
    # vLLM's older name is of the time between tokens.
    "vllm:time_per_output_token_seconds": "tokenyard_inter_token_latency_seconds",
    "vllm:inter_token_latency_seconds": "tokenyard_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "tokenyard_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "tokenyard_e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "tokenyard_queue_time_seconds",
    "vllm:request_prompt_tokens": "tokenyard_request_prompt_tokens",
    "vllm:request_generation_tokens": "tokenyard_request_generation_tokens",
}
_GAUGES = {
    "vllm:num_requests_waiting": "tokenyard_requests_waiting",
    "vllm:num_requests_running": "tokenyard_requests_running",
}
_COUNTERS = {
    "vllm:prompt_tokens": "tokenyard_prompt_tokens",
    "vllm:generation_tokens": "tokenyard_generation_tokens",
    "vllm:prefix_cache_queries": "tokenyard_scheduler_placed_tokens",
    "vllm:prefix_cache_hits": "tokenyard_scheduler_saved_tokens",
    "vllm:num_preemptions": "tokenyard_scheduler_preemptions",
}


def labels_of(model_name: str) -> dict[str, str]:
    return {"engine": "0", "model_name": model_name}


def vllm_families(families: Mapping[str, Metric], model_name: str) -> Iterator[Metric]:
    """The counters and gauges whose sources are among `families`. Histograms are `HISTOGRAMS`."""
    labels = labels_of(model_name)
    for names, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for name, source in names.items():
            if source in families:
                yield _family(kind, name, source, _total(families, source), labels)
    if "tokenyard_answers" in families:
        yield _answers(families, labels)
    if "tokenyard_kv_blocks" in families:
        yield from _memory(families, labels)
    if "tokenyard_adapter_ready" in families:
        yield _adapters(families, labels)


def _answers(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Metric:
    source = "tokenyard_answers"
    family = CounterMetricFamily("vllm:request_success", f"As {source}", labels=[*labels, "finished_reason"])
    for reason in ("stop", "length", "abort"):
        family.add_metric([*labels.values(), reason], _total(families, source, finished_reason=reason))
    return family


def _memory(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    source = "tokenyard_kv_blocks"
    used = _total(families, source, state="used")
    capacity = _total(families, source, state="total")
    gauge = partial(_family, GaugeMetricFamily, source=source, labels=labels)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        yield gauge(name, value=used / capacity if capacity else 0.0)
    size = int(_total(families, "tokenyard_kv_block_size"))
    sizes = {"block_size": str(size), "num_gpu_blocks": str(int(capacity))}
    yield _family(GaugeMetricFamily, "vllm:cache_config_info", source, 1.0, {**labels, **sizes})


def _adapters(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Metric:
    """The adapters that have requests. vLLM's value is the time of a change, by which pickers find the newest sample;
    here there is always one sample."""
    source = "tokenyard_adapter_requests"
    users = {s.labels["adapter"]: s.value for s in families[source].samples} if source in families else {}
    running = ",".join(sorted(name for name, count in users.items() if count))
    facts = {"max_lora": str(len(users)), "running_lora_adapters": running, "waiting_lora_adapters": ""}
    return _family(GaugeMetricFamily, "vllm:lora_requests_info", source, 1.0, {**labels, **facts})


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    source: str,
    value: float,
    labels: Mapping[str, str],
) -> Metric:
    family = kind(name, f"As {source}", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _total(families: Mapping[str, Metric], name: str, **labels: str) -> float:
    wanted = labels.items()
    samples = families[name].samples if name in families else []
    return sum(s.value for s in samples if not s.name.endswith("_created") and wanted <= s.labels.items())
