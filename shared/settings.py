"""The settings of one server: each field is a flag, an environment variable and a TOML key, with one meaning.

The supervisor resolves them once (settings_sources.py) and writes the result into the run directory. Every process
reads that file, so all of them see the same values.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared import setting_checks as known
from shared.adapter_paths import named_paths
from shared.logs import FORMATS
from shared.setting_checks import SettingsError as SettingsError
from shared.setting_checks import check, check_adapters, check_group, check_hosts, check_spill, parse_memory
from shared.setting_forms import are_devices, are_models, are_origins, entries, guesses_of, is_tcp


def _setting(group: str, default: Any, help_text: str, secret: bool = False) -> Any:
    # A secret is never printed, logged or written down, so `repr` leaves it out, too.
    return field(default=default, repr=not secret, metadata={"help": help_text, "group": group, "secret": secret})


@dataclass(frozen=True)
class Settings:
    """All settings of an operator. The `help` and `group` metadata make `--help` and docs/settings.md."""

    model: str = _setting(
        "model",
        "",
        "Hugging Face directory or hub name, or GGUF (FILE.gguf, a folder with one, or HUB/NAME:Q4_K_M); empty serves "
        "the embedded demo model, which needs no network",
    )
    host: str = _setting("network", "127.0.0.1", "address to listen on; 0.0.0.0 exposes the server to your network")
    port: int = _setting("network", 8000, "TCP port of the HTTP API, shared by all API processes")
    ollama_port: int = _setting(
        "network",
        0,
        "further TCP port with the same routes, for clients of Ollama that have 11434 fixed (docs/ollama.md); 0: none",
    )
    api_servers: int = _setting(
        "network", 1, "API processes; more of them help when tokenizing or streaming saturates one core"
    )
    keep_alive_timeout: int = _setting(
        "network",
        75,
        "seconds that an idle connection stays open; a proxy in front must keep it for less, or it sends requests into "
        "closed connections",
    )
    api_key: str = _setting(
        "access",
        "",
        "key that clients must send (`Authorization: Bearer KEY`, `x-api-key` or `api-key`), or several with commas; "
        "in plain or as sha256:HEX; --api-key=KEY if it begins with a dash; none: every client is served",
        secret=True,
    )
    api_key_file: str = _setting(
        "access",
        "",
        "file with further such keys, one a line, each perhaps with weight, name and limits (docs/usage.md); it is "
        "read at the start and at SIGHUP, and keeps them out of `ps`",
    )
    admin_api_key: str = _setting(
        "access",
        "",
        "key for the operator's routes (/flush_cache, /abort_request...); without one they answer only a server's own "
        "host, if it listens on a loopback address, and neither proxies nor web pages of other sites",
        secret=True,
    )
    private_metrics: bool = _setting(
        "access",
        False,
        "let /metrics want an API key as other routes do; Prometheus sends one as its `authorization: credentials`",
    )
    ui: bool = _setting("access", True, "serve the page for people at /ui/ (chat, live figures, requests)")
    cors_origins: str = _setting(
        "access",
        "auto",
        "web pages whose scripts may use this server: origins such as https://chat.example.com with commas, * for all, "
        "or none; auto: with API keys all (they need a key, too), otherwise pages of this host (http://localhost:3000)",
    )
    ssl_certfile: str = _setting("access", "", "PEM file with the certificate chain: serve HTTPS instead of HTTP")
    ssl_keyfile: str = _setting("access", "", "PEM file with the certificate's private key, if it is not in the other")
    ssl_ca_certs: str = _setting(
        "access", "", "PEM file with authorities; clients must show a certificate that one of them has signed"
    )
    fetch_hosts: str = _setting(
        "access",
        "",
        "hosts from which documents and images that requests name by URL are fetched: NAME, *.SUFFIX, ADDRESS or "
        "NETWORK, with commas; names lead to public addresses and to those listed; none: no URL is ever fetched",
    )
    worker_endpoint: str = _setting(
        "access",
        "",
        "tcp://ADDRESS:PORT at which workers of other machines may join (`tokenyard worker`); it wants curve_keys",
    )
    curve_keys: str = _setting("access", "", "folder with the CURVE keys of worker_endpoint, made by `tokenyard keys`")
    kv_events: str = _setting(
        "access",
        "",
        "tcp://ADDRESS:PORT at which the blocks of prefix caches are published in vLLM's form; other addresses than "
        "loopback want worker_endpoint, whose peers may read",
    )
    devices: str = _setting(
        "capacity",
        "auto",
        "one worker per entry, data parallel: cpu, cuda:0,cuda:1 or cpu,cpu; cuda:0+cuda:1 is one worker on two GPUs; "
        "auto takes all GPUs, else one cpu; none: only workers of other machines compute (worker_endpoint)",
    )
    tensor_parallel: int = _setting(
        "capacity",
        1,
        "processes that are one model worker together, each with a part of every layer, on a CPU or a GPU each "
        "(docs/groups.md); not with adapters, guesses, images, quantized or changing weights",
    )
    dtype: str = _setting("model", "auto", "weights and KV cache: auto (as stored), float32, bfloat16 or float16")
    task: str = _setting(
        "model",
        "auto",
        "generate, embed, embed_tokens, sparse, rerank, classify, classify_tokens, speak or paint: what the model is "
        "served for; auto: as its files say",
    )
    quantization: str = _setting(
        "model",
        "none",
        "none, or int8: weights of linear layers in one byte each, half the memory to read per token; CPU only",
    )
    kv_dtype: str = _setting(
        "model", "auto", "type of K and V: auto (as dtype), or on a CPU int8 or fp8 (docs/checkpoints.md)"
    )
    max_model_len: int | None = _setting(
        "model", None, "longest prompt + answer in tokens; default: what the model and the KV memory allow"
    )
    max_batch_tokens: int | None = _setting(
        "capacity",
        None,
        "tokens one forward pass may take; more speeds up long prompts and delays the next token of all others; "
        "default: 512, on a GPU 8192 (2048 below 40 GiB), and for texts to embed or classify 4096 on a CPU and 16384 "
        "on a GPU",
    )
    max_running: int | None = _setting(
        "capacity",
        None,
        "sequences computed together on one worker; further requests wait; default: 128, and 256 on a GPU",
    )
    max_queued: int = _setting(
        "capacity", 1024, "requests that may wait; further ones are answered 429 with Retry-After"
    )
    max_queued_tokens: int = _setting(
        "capacity", 4_000_000, "tokens that the waiting requests may have together; further ones are answered 429"
    )
    max_open_per_key: int = _setting(
        "capacity", 0, "requests of one API key that may wait and run at once; further ones are answered 429; 0: any"
    )
    max_best_of: int = _setting(
        "capacity", 2, "answers that one TGI request may draw with best_of, of which the most likely is returned"
    )
    kv_memory: str = _setting(
        "capacity",
        "auto",
        "memory for the KV cache per worker, e.g. 512MB or 4GB; auto: on CPU a quarter of free memory, at most 4GB; "
        "on a GPU 90 % of all, divided by the number of workers there, without weights and what a step takes",
    )
    kv_spill: str = _setting(
        "capacity",
        "0",
        "bytes, such as 20GB, for blocks that leave the KV cache of each worker, which come back where that is quicker "
        "than computing them (docs/scale.md): in kv_spill_dir, or of a GPU in host memory; 0: none",
    )
    kv_spill_dir: str = _setting(
        "capacity",
        "",
        "folder on a fast disk for kv_spill; its files have no names and end with their worker; none: host memory",
    )
    served_model_name: str = _setting(
        "model", "", "name that clients use for the model; default: the last part of MODEL"
    )
    also: str = _setting(
        "model",
        "",
        "further models on the same port: NAME=MODEL, with commas or the flag once for each; a request's `model` "
        "chooses; they have the defaults of task, quantization, lengths, parsers and processors, which are the first "
        "model's",
    )
    lora: str = _setting(
        "model",
        "",
        "adapters to start with: NAME=FOLDER, with commas or the flag once for each; a request's `model` chooses "
        "(docs/adapters.md), and its `lora` for a model that paints (docs/images_out.md)",
    )
    lora_dirs: str = _setting(
        "access",
        "",
        "folders below which operators may load adapters into the running server, with commas or the flag once for "
        "each; none: no adapter is loaded by its path",
    )
    weights_dirs: str = _setting(
        "access",
        "",
        "folders below which operators may name other weights for the running model (docs/weights.md), with commas or "
        "the flag once for each; none: no weights are read but the model's own and those that are sent",
    )
    lora_memory: str = _setting(
        "capacity",
        "auto",
        "memory of each worker for adapters; others leave it when one is wanted and no request uses them; auto: a "
        "sixteenth of what is free on a CPU; on a GPU as docs/gpu.md says",
    )
    tool_parser: str = _setting(
        "model",
        "auto",
        "how the model writes tool calls (docs/tools.md); auto: as its chat template shows; none: as text",
    )
    reasoning_parser: str = _setting(
        "model",
        "auto",
        "how the model marks reasoning (docs/tools.md); auto: as its chat template shows; none: as text",
    )
    vision: bool = _setting(
        "model", True, "let a model that takes images take them; without, its vision tower is dropped"
    )
    control_tokens: bool = _setting(
        "model",
        False,
        "let the name of a control token in a message (</s>, say) stand for that token, as it does in plain prompts; "
        "the author of any part of a message can then forge turns of the conversation",
    )
    overlap: bool = _setting(
        "behaviour", True, "keep two steps in flight, so that the device never waits for the scheduler"
    )
    speculate: str | int = _setting(
        "behaviour",
        "0",
        "tokens to guess ahead of each sequence; a pass verifies all of them, and no answer changes; auto: as many as "
        "save time, by what the worker learns; N: always up to so many; 0: none",
    )
    weight_keeper: bool = _setting(
        "behaviour",
        False,
        "let a process beside each GPU's worker own the memory of its weights, so that the worker after a killed one "
        "reads no files (docs/gpu.md); it has not run on a GPU yet",
    )
    draft: str = _setting(
        "behaviour",
        "text,suffix",
        "what guesses, with commas: text, suffix, the folder of a smaller model or of an EAGLE-3 head "
        "(docs/speculation.md)",
    )
    limit_images: int = _setting("capacity", 32, "images, and videos, that one request may have; 0: none")
    max_image_tokens: int | None = _setting(
        "capacity",
        None,
        "tokens that one image may take, where the model can be shown a smaller one; default: 1280 on a CPU, 4096 on "
        "a GPU",
    )
    max_video_tokens: int | None = _setting(
        "capacity",
        None,
        "tokens that one video may take: frames become smaller, or fewer; default: four times max_image_tokens",
    )
    max_audio_seconds: int = _setting("capacity", 1800, "longest sound file of a request, in seconds, at most 1800")
    voice_clips: bool = _setting(
        "behaviour",
        False,
        "let requests for speech have a clip of the voice to imitate (ref_audio), where the model generates speech "
        "tokens; a client can then make it sound like any person",
    )
    media_cache: str = _setting(
        "capacity",
        "256MiB",
        "memory of each API process for images and videos that it has read, which clients send again with each turn",
    )
    prefix_cache: bool = _setting("behaviour", True, "reuse the KV blocks of prompts that start alike")
    hidden_states: bool = _setting(
        "behaviour", False, "let clients ask for hidden states (SGLang's return_hidden_states), whose answers are large"
    )
    logit_processors: str = _setting(
        "behaviour",
        "",
        "logits processors that clients may name, with commas: MODULE:CLASS, NAME=MODULE:CLASS, MODULE (all it lists), "
        "an entry point's name, or `installed` (all entry points); run in the worker",
    )
    stall_timeout: int = _setting(
        "behaviour",
        15,
        "seconds that a worker's step may take in any case, before it counts as stuck and the worker is restarted; the "
        "rest of the allowance is learnt from the steps before",
    )
    drain_delay: int = _setting(
        "behaviour",
        0,
        "seconds after SIGTERM in which /ready says 503 and requests are served as before, so that load balancers send "
        "none by the time they would be refused; while requests come there are 2 to 5 such seconds more",
    )
    drain_timeout: int = _setting(
        "behaviour",
        30,
        "seconds that requests get to finish after SIGTERM and drain_delay; then they end with an error",
    )
    batch_dir: str = _setting(
        "behaviour",
        "",
        "folder for files and batches (/v1/files, /v1/batches, /v1/messages/batches; docs/batches.md), whose state "
        "lies in it; none: those routes are off",
    )
    batch_space: str = _setting("behaviour", "10GB", "bytes that batch_dir may take; when it is full batches wait")
    log_level: str = _setting("behaviour", "info", "debug, info, warning or error")
    log_format: str = _setting(
        "behaviour", "text", "text, or json: one object a line, of all processes and the supervisor"
    )
    access_log: bool = _setting(
        "behaviour",
        False,
        "write a line for each HTTP request: path, status, key's name, tokens, durations, outcome; never a text or key",
    )

    def __post_init__(self) -> None:
        check(self.host != "", "host", self.host, "an address, such as 127.0.0.1 or 0.0.0.0")
        check(1 <= self.port <= 65535, "port", self.port, "1 to 65535")
        further = self.ollama_port
        check(0 <= further <= 65535 and further != self.port, "ollama_port", further, "0, or 1 to 65535 and not port")
        for name, least in known.LEAST.items():
            number = getattr(self, name)
            check(number is None or number >= least, name, number, f"at least {least}")
        for name, (least, most) in known.RANGES.items():
            check(least <= getattr(self, name) <= most, name, getattr(self, name), f"{least} to {most}")
        check(self.max_open_per_key >= 0, "max_open_per_key", self.max_open_per_key, "0 or more")
        check(guesses_of(str(self.speculate)) >= 0, "speculate", self.speculate, "auto, or 0 to 15")
        check(self.api_servers <= 64, "api_servers", self.api_servers, "at most 64")
        check((self.max_running or 1) <= 4096, "max_running", self.max_running, "at most 4096")
        check(self.dtype in known.DTYPES, "dtype", self.dtype, "one of " + ", ".join(known.DTYPES))
        check(self.task in known.TASKS, "task", self.task, "one of " + ", ".join(known.TASKS))
        check(self.quantization in known.QUANTIZATIONS, "quantization", self.quantization, "none or int8")
        check(self.kv_dtype in known.KV_DTYPES, "kv_dtype", self.kv_dtype, "auto, int8 or fp8")
        check(self.log_level in known.LOG_LEVELS, "log_level", self.log_level, "one of " + ", ".join(known.LOG_LEVELS))
        check(self.log_format in FORMATS, "log_format", self.log_format, "text or json")
        parse_memory(self.kv_memory)
        for name, examples in (("media_cache", "256MiB or 1GB"), ("batch_space", "500MB or 10GB")):
            size = getattr(self, name)
            check(size != "auto", name, size, f"a size such as {examples}")
            parse_memory(size, name)
        check(
            all(re.fullmatch(r"([\w.-]+=)?[\w.]+:\w+|[\w.-]+", entry) for entry in entries(self.logit_processors)),
            "logit_processors",
            self.logit_processors,
            "a list of MODULE:CLASS, NAME=MODULE:CLASS, MODULE, or names of entry points",
        )
        parse_memory(self.lora_memory, "lora_memory")
        check_spill(self.kv_spill, self.kv_spill_dir, self.devices, self.prefix_cache)
        check_adapters(self.lora, {self.public_model_name, self.model, *self.further_models})
        check(are_models(self.also, self.public_model_name), "also", self.also, known.FURTHER_MODELS)
        check_hosts(self.fetch_hosts)
        origins = "auto, none, *, or a list of SCHEME://HOST or SCHEME://HOST:PORT without a path"
        check(are_origins(self.cors_origins), "cors_origins", self.cors_origins, origins)
        has_keys = self.api_key or self.api_key_file
        check(bool(has_keys) or not self.private_metrics, "private_metrics", True, "used with api_key or api_key_file")
        endpoint = self.worker_endpoint
        check(not endpoint or is_tcp(endpoint), "worker_endpoint", endpoint, "tcp://ADDRESS:PORT")
        check(not self.kv_events or is_tcp(self.kv_events), "kv_events", self.kv_events, "tcp://ADDRESS:PORT")
        check(
            are_devices(self.devices), "devices", self.devices, "auto, none, or a list of cpu, cuda:N and cuda:N+cuda:M"
        )
        kept = self.weight_keeper and "cpu" in self.devices
        check(not kept, "weight_keeper", True, "used with GPUs alone: the weights of a CPU's worker are not kept")
        check_group(self.tensor_parallel, dataclasses.asdict(self))
        alone = self.devices == "none" and (not endpoint or bool(self.also))
        check(not alone, "devices", "none", "used with worker_endpoint, and without also: no worker is here then")

    @property
    def public_model_name(self) -> str:
        """The model name that clients see."""
        return self.served_model_name or Path(self.model).name or "tokenyard-demo"

    @property
    def further_models(self) -> dict[str, str]:
        """Folders or hub names of the further models, by the names that clients use."""
        pairs = (entry.partition("=") for entry in self.also.split(",") if entry)
        return {name.strip(): model.strip() for name, _, model in pairs}

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Folders of the adapters that the server starts with, by name."""
        return named_paths(self.lora)

    @property
    def processor_entries(self) -> list[str]:
        """The entries that name logits processors, as the worker's registry reads them."""
        return list(entries(self.logit_processors))

    @property
    def most_guesses(self) -> int:
        """The most tokens of a sequence that a pass guesses."""
        return guesses_of(str(self.speculate))

    @property
    def scheme(self) -> str:
        """The scheme of the server's URL."""
        return "https" if self.ssl_certfile else "http"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the effective settings that the supervisor wrote."""
        return cls(**json.loads(path.read_text()))


def types_of(name: str) -> tuple[type, ...]:
    """Return the types that a setting may have."""
    hint = _HINTS[name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Settings))
_HINTS: dict[str, Any] = typing.get_type_hints(Settings)
# Settings that are keys to something: never shown.
SECRETS = frozenset(f.name for f in dataclasses.fields(Settings) if f.metadata["secret"])
# Access settings: none of them can be given as nothing.
GUARDS = frozenset(f.name for f in dataclasses.fields(Settings) if f.metadata["group"] == "access" and f.default == "")
# The type of each setting's value: bool, int or str.
KINDS: Mapping[str, type] = {name: types_of(name)[0] for name in FIELDS}
