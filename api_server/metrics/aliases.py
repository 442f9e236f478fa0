"""The figures under the names that the dashboards of TGI, SGLang and vLLM use.

Derived from this server's own families at scrape time, so nothing is counted twice. A name appears only where its
meaning is the same; bucket bounds are this server's; vLLM's are in `vllm_names.py`, and those of guesses here. Where
the server has several models, facts of schedulers are those of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UntypedMetricFamily

from api_server.metrics.vllm_names import HISTOGRAMS, labels_of, vllm_families

_TGI_FAILURES = {
    "invalid": "validation",
    "overloaded": "overloaded",
    "rate_limited": "overloaded",
    "unavailable": "overloaded",
    "failed": "generation",
    "cancelled": "dropped",
}

_TGI_HISTOGRAMS = {
    "tgi_request_duration": "tokenyard_e2e_request_latency_seconds",
    "tgi_request_validation_duration": "tokenyard_request_validation_seconds",
    "tgi_request_queue_duration": "tokenyard_queue_time_seconds",
    "tgi_request_mean_time_per_token_duration": "tokenyard_time_per_output_token_seconds",
    "tgi_request_generated_tokens": "tokenyard_request_generation_tokens",
    "tgi_request_input_length": "tokenyard_request_prompt_tokens",
}
_SGLANG_HISTOGRAMS = {
    "sglang:time_to_first_token_seconds": "tokenyard_time_to_first_token_seconds",
    "sglang:queue_time_seconds": "tokenyard_queue_time_seconds",
    "sglang:inter_token_latency_seconds": "tokenyard_inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds": "tokenyard_time_per_output_token_seconds",
    "sglang:e2e_request_latency_seconds": "tokenyard_e2e_request_latency_seconds",
}
_SGLANG_COUNTERS = {
    "sglang:prompt_tokens": "tokenyard_prompt_tokens",
    "sglang:generation_tokens": "tokenyard_generation_tokens",
    "sglang:cached_tokens": "tokenyard_cached_prompt_tokens",
}
_VLLM_COUNTERS = {
    "vllm:spec_decode_num_drafts": "tokenyard_worker_drafts",
    "vllm:spec_decode_num_draft_tokens": "tokenyard_worker_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "tokenyard_worker_accepted_tokens",
}
_GAUGES = {
    "tgi_queue_size": "tokenyard_requests_waiting",
    "tgi_batch_current_size": "tokenyard_requests_running",
    "sglang:num_queue_reqs": "tokenyard_requests_waiting",
    "sglang:num_running_reqs": "tokenyard_requests_running",
}


def aliases(families: Mapping[str, Metric], model_name: str) -> Iterator[Metric]:
    """Every alias whose source is among `families`. SGLang's names carry `model_name`, as upstream."""
    labels = {"model_name": model_name}
    families = dict(_of_model(families, model_name))
    for name, source in _GAUGES.items():
        if source in families:
            yield _gauge(name, source, total(families, source), labels)
    of_vllm = HISTOGRAMS, labels_of(model_name)
    for table, extra in ((_TGI_HISTOGRAMS, {}), (_SGLANG_HISTOGRAMS, labels), of_vllm):
        for name, source in table.items():
            if source in families:
                yield _renamed(families[source], name, extra)
    for name, source in _SGLANG_COUNTERS.items():
        yield _counter(name, source, total(families, source), labels)
    yield from _tgi_requests(families)
    yield from _sglang_requests(families, labels)
    yield from _sglang_memory(families, labels)
    yield from _guesses(families, labels)
    yield from vllm_families(families, model_name)


def _of_model(families: Mapping[str, Metric], model_name: str) -> Iterator[tuple[str, Metric]]:
    """The families without the samples of other models, and without families that had no others."""
    for name, family in families.items():
        samples = [sample for sample in family.samples if sample.labels.get("model", model_name) == model_name]
        if len(samples) == len(family.samples):
            yield name, family
        elif samples:
            found = Metric(name, family.documentation, family.type)
            found.samples = samples
            yield name, found


def total(families: Mapping[str, Metric], name: str, **labels: str) -> float:
    """Sum of a counter's or gauge's samples that have these labels; 0 for a family with no samples yet."""
    samples = families[name].samples if name in families else []
    wanted = labels.items()
    return sum(s.value for s in samples if not s.name.endswith("_created") and wanted <= s.labels.items())


def _tgi_requests(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """TGI's request counters. They have no `_total` suffix, which the text format only allows to untyped families."""
    requests = "tokenyard_requests"
    yield UntypedMetricFamily("tgi_request_count", f"As {requests}", value=total(families, requests))
    yield UntypedMetricFamily("tgi_request_success", f"As {requests}", value=total(families, requests, outcome="ok"))
    failures = UntypedMetricFamily("tgi_request_failure", f"As {requests}", labels=["err"])
    for err in dict.fromkeys(_TGI_FAILURES.values()):
        outcomes = [outcome for outcome, name in _TGI_FAILURES.items() if name == err]
        failures.add_metric([err], sum(total(families, requests, outcome=o) for o in outcomes))
    yield failures


def _sglang_requests(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    requests = "tokenyard_requests"
    yield _counter("sglang:num_requests", requests, total(families, requests), labels)
    cancelled = total(families, requests, outcome="cancelled")
    yield _counter("sglang:num_aborted_requests", requests, cancelled, labels)
    prompt = total(families, "tokenyard_prompt_tokens")
    hit_rate = total(families, "tokenyard_cached_prompt_tokens") / prompt if prompt else 0.0
    yield _gauge("sglang:cache_hit_rate", "tokenyard_cached_prompt_tokens", hit_rate, labels)


def _sglang_memory(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    blocks = "tokenyard_kv_blocks"
    if blocks not in families:
        return
    used = total(families, blocks, state="used")
    capacity = total(families, blocks, state="total")
    size = total(families, "tokenyard_kv_block_size")
    yield _gauge("sglang:num_used_tokens", blocks, used * size, labels)
    yield _gauge("sglang:max_total_num_tokens", blocks, capacity * size, labels)
    yield _gauge("sglang:token_usage", blocks, used / capacity if capacity else 0.0, labels)


def _guesses(families: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """What guesses saved. vLLM's counters, and SGLang's tokens of a pass and share of right guesses."""
    if "tokenyard_worker_drafts" not in families:
        return
    for name, source in _VLLM_COUNTERS.items():
        yield _counter(name, source, total(families, source), labels)
    source = "tokenyard_worker_accepted_tokens_per_pos"
    at = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", f"As {source}", labels=["position", *labels]
    )
    positions = {sample.labels["position"] for sample in families[source].samples} if source in families else set()
    for position in sorted(positions, key=int):
        at.add_metric([position, *labels.values()], total(families, source, position=position))
    yield at
    drafts, guessed, right = (total(families, source) for source in _VLLM_COUNTERS.values())
    if drafts:
        yield _gauge("sglang:spec_accept_length", "tokenyard_worker_drafts", 1 + right / drafts, labels)
        yield _gauge("sglang:spec_accept_rate", "tokenyard_worker_accepted_tokens", right / guessed, labels)


def _gauge(name: str, source: str, value: float, labels: Mapping[str, str]) -> Metric:
    labels = labels if name.startswith("sglang:") else {}
    family = GaugeMetricFamily(name, f"As {source}", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, source: str, value: float, labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(name, f"As {source}", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    copy = Metric(name, f"As {family.name}", family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            copy.add_sample(name + sample.name.removeprefix(family.name), {**sample.labels, **labels}, sample.value)
    return copy
