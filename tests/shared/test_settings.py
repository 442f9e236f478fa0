"""Settings: precedence, errors that name field, value, source and remedy, and the file that processes read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces.wire.shared_memory import WATERMARK_VARIABLES
from shared.forkserver import FORKS
from shared.liveness import SUPERVISOR_PID
from shared.logs import FORMATS
from shared.phases import STATUS_FD
from shared.setting_checks import DTYPES, KV_DTYPES, LOG_LEVELS, QUANTIZATIONS, TASKS, parse_memory
from shared.setting_forms import running_rows, step_tokens
from shared.settings import FIELDS, GUARDS, KINDS, SECRETS, Settings, SettingsError
from shared.settings_sources import config_file, resolve

devices = st.one_of(
    st.just("auto"),
    st.lists(st.one_of(st.just("cpu"), st.integers(0, 15).map(lambda n: f"cuda:{n}")), min_size=1).map(",".join),
)
values: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "host": st.sampled_from(["127.0.0.1", "0.0.0.0", "::", "localhost"]),
    "port": st.integers(1, 65535),
    "api_servers": st.integers(1, 64),
    "keep_alive_timeout": st.integers(1, 3600),
    "private_metrics": st.just(False),  # True wants keys: tests/api_server/web/test_access.py
    "cors_origins": st.sampled_from(["auto", "none", "*", "null, https://example.com", "http://[::1]:3000"]),
    "devices": devices,
    "weight_keeper": st.just(False),  # True wants GPUs alone: below.
    "tensor_parallel": st.just(1),  # More want other settings as they are: below.
    "dtype": st.sampled_from(DTYPES),
    "task": st.sampled_from(TASKS),
    "quantization": st.sampled_from(QUANTIZATIONS),
    "kv_dtype": st.sampled_from(KV_DTYPES),
    "max_model_len": st.integers(2, 10**7),
    "max_batch_tokens": st.integers(1, 10**6),
    "max_running": st.integers(1, 4096),
    "max_queued": st.integers(1, 10**6),
    "max_best_of": st.integers(1, 64),
    "kv_memory": st.one_of(st.just("auto"), st.integers(1, 4000).map(lambda n: f"{n}MB")),
    # Another size wants a folder and prefix_cache: below.
    "kv_spill": st.just("0"),
    "kv_spill_dir": st.just(""),
    "also": st.sampled_from(["embedder=org/embedder", "embedder=a/b,reranker=c/d"]),
    "lora": st.sampled_from(["", "sql=./sql", "sql=/a/b, fr:v2=c"]),
    "lora_dirs": st.sampled_from(["/adapters", "./a,./b"]),
    "weights_dirs": st.sampled_from(["/weights", "./a,./b"]),
    "lora_memory": st.sampled_from(["auto", "64MB"]),
    "served_model_name": st.text("abc/-é'\"", max_size=20),
    "tool_parser": st.sampled_from(["auto", "none", "hermes"]),
    "reasoning_parser": st.sampled_from(["auto", "none", "think"]),
    "overlap": st.booleans(),
    "draft": st.sampled_from(["text", "suffix,./small", "org/small"]),
    "speculate": st.sampled_from(["auto", "0", "7", "15"]),
    "prefix_cache": st.booleans(),
    "hidden_states": st.booleans(),
    "voice_clips": st.booleans(),
    "logit_processors": st.sampled_from(["", "a.b:C", "x=a.b:C, d:E", "a.module, ban-words, installed"]),
    "max_queued_tokens": st.integers(1, 10**9),
    "max_open_per_key": st.integers(0, 10**6),
    "stall_timeout": st.integers(1, 10**6),
    "drain_timeout": st.integers(0, 3600),
    "drain_delay": st.integers(0, 3600),
    "control_tokens": st.booleans(),
    "limit_images": st.integers(0, 1024),
    "max_audio_seconds": st.integers(1, 1800),
    "max_image_tokens": st.integers(16, 10**6),
    "max_video_tokens": st.integers(16, 10**6),
    "media_cache": st.integers(1, 4000).map(lambda n: f"{n}MiB"),
    "vision": st.booleans(),
    # Another number may be that of `port`.
    "ollama_port": st.just(0),
    "batch_dir": st.sampled_from(["/batches", "./batches"]),
    "batch_space": st.sampled_from(["500MB", "10GB"]),
    "log_level": st.sampled_from(LOG_LEVELS),
    "log_format": st.sampled_from(FORMATS),
    "access_log": st.booleans(),
    "ui": st.booleans(),
}
digests = st.binary(min_size=32, max_size=32).map(lambda digest: f"sha256:{digest.hex()}")
values |= {name: st.lists(digests, min_size=1, max_size=3).map(",".join) for name in SECRETS}
values |= {name: st.text("abc/-", min_size=1, max_size=9) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
values["kv_events"] = st.sampled_from(["tcp://127.0.0.1:5557", "tcp://[::1]:5557"])
values["worker_endpoint"] = st.sampled_from(["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://[::1]:5600"])
values["fetch_hosts"] = st.sampled_from(["docs.example.com, *.example.org", "10.0.0.0/8,::1,wiki"])
values["curve_keys"] = st.text("abc/-", min_size=1, max_size=9)
# A file of keys is read where it is named: tests/shared/test_access_keys.py.
layers = st.fixed_dictionaries({}, optional=values)


def as_environment(layer: dict[str, Any]) -> dict[str, str]:
    return {f"TOKENYARD_{name.upper()}": str(value) for name, value in layer.items()}


def as_toml(layer: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in layer.items())


def test_the_strategies_cover_every_setting() -> None:
    assert set(values) == set(FIELDS) - {"api_key_file"}


@given(flags=layers, environment=layers, file=layers)
def test_the_highest_layer_that_has_a_value_wins(
    tmp_path_factory: pytest.TempPathFactory, flags: dict[str, Any], environment: dict[str, Any], file: dict[str, Any]
) -> None:
    config = tmp_path_factory.getbasetemp() / "settings.toml"
    config.write_text(as_toml(file).replace("\x7f", "\\u007f"), encoding="utf-8")
    resolved = resolve(flags, as_environment(environment), config)
    for name in FIELDS:
        value = getattr(resolved.settings, name)
        if name in flags:
            assert (value, resolved.sources[name]) == (flags[name], "command line")
        elif name in environment:
            assert (value, resolved.sources[name]) == (environment[name], "environment")
        elif name in file:
            assert (value, resolved.sources[name]) == (file[name], f"file {config}")
        else:
            assert (value, resolved.sources[name]) == (getattr(Settings(), name), "default")


def test_weights_are_kept_on_gpus_alone() -> None:
    assert Settings(weight_keeper=True, devices="cuda:0,cuda:1").weight_keeper
    for devices in ("cpu", "cuda:0,cpu"):
        with pytest.raises(SettingsError, match="weight_keeper must be used with GPUs alone"):
            Settings(weight_keeper=True, devices=devices)


@given(layers)
def test_the_run_directorys_file_brings_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory, layer: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "settings.json"
    settings = Settings(**layer)
    file.write_text(settings.to_json())
    assert Settings.read(file) == settings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 0}, ["port must be 1 to 65535", "0", "command line"]),
        ({"port": 65536}, ["65536"]),
        ({"api_servers": 0}, ["api_servers must be at least 1"]),
        ({"api_servers": 65}, ["at most 64"]),
        ({"max_running": 5000}, ["max_running must be at most 4096", "5000"]),
        ({"max_model_len": 1}, ["max_model_len must be at least 2"]),
        ({"quantization": "int4"}, ["quantization must be none or int8, got 'int4'", "command line"]),
        ({"kv_dtype": "int4"}, ["kv_dtype must be auto, int8 or fp8, got 'int4'", "command line"]),
        ({"dtype": "int4"}, ["dtype must be one of auto, float32", "'int4'"]),
        ({"log_format": "xml"}, ["log_format must be text or json, got 'xml'", "command line"]),
        ({"log_level": "loud"}, ["log_level", "'loud'", "warning"]),
        ({"devices": "tpu"}, ["devices", "'tpu'", "cuda:N"]),
        ({"devices": "auto,cpu"}, ["devices"]),
        ({"devices": "cpu,"}, ["devices"]),
        ({"devices": "cuda:²"}, ["devices"]),
        ({"media_cache": "auto"}, ["media_cache must be a size such as 256MiB", "'auto'", "command line"]),
        ({"limit_images": 1025}, ["limit_images must be 0 to 1024, got 1025"]),
        ({"max_image_tokens": 1}, ["max_image_tokens must be at least 16, got 1"]),
        ({"kv_memory": "lots"}, ["kv_memory", "'lots'", "512MB", "command line"]),
        ({"kv_spill": "lots", "kv_spill_dir": "/x"}, ["kv_spill must be 0, or a size such as 20GB, got 'lots'"]),
        ({"kv_spill": "auto", "kv_spill_dir": "/x"}, ["kv_spill must be 0, or a size", "'auto'", "command line"]),
        ({"kv_spill": "1GB", "devices": "cpu"}, ["kv_spill must be used with kv_spill_dir on a CPU", "'1GB'"]),
        ({"kv_spill": "1GB", "kv_spill_dir": "/x", "prefix_cache": False}, ["kv_spill", "prefix_cache"]),
        ({"kv_spill_dir": "/x"}, ["kv_spill_dir must be used with kv_spill, got '/x'"]),
        ({"host": ""}, ["host", "127.0.0.1"]),
        (
            {"fetch_hosts": "a.example,http://b"},
            ["fetch_hosts must be", "http://b", "docs.example.com", "command line"],
        ),
        ({"worker_endpoint": "ipc:///tmp/x"}, ["worker_endpoint", "tcp://ADDRESS:PORT"]),
        ({"kv_events": "5557"}, ["kv_events", "tcp://ADDRESS:PORT"]),
        ({"tensor_parallel": 17}, ["tensor_parallel must be 1 to 16, got 17"]),
        *(
            ({"tensor_parallel": 2, name: value}, [f"{name} {value!r} does not work with tensor_parallel 2", remedy])
            for name, value, remedy in (
                ("quantization", "int8", "use quantization 'none', or leave tensor_parallel out"),
                ("kv_dtype", "fp8", "use kv_dtype 'auto'"),
                ("speculate", "auto", "use speculate 0"),
                ("lora", "a=b", "use lora ''"),
                ("task", "embed", "use task 'auto'"),
                ("devices", "cuda:0", "name 2 GPUs for each worker, such as devices cuda:0+cuda:1"),
                ("devices", "cuda:0+cuda:1+cuda:2", "name 2 GPUs for each worker, such as devices cuda:0+cuda:1"),
                ("kv_spill", "1GB", "use kv_spill '0'"),
                ("weight_keeper", True, "use weight_keeper False"),
            )
        ),
        ({"devices": "cuda:0+cuda:1,cuda:2"}, ["devices must be workers with as many GPUs each, got 'cuda:0+cuda:1,"]),
        ({"devices": "cuda:0+cuda:0"}, ["devices must be groups of different GPUs, got 'cuda:0+cuda:0'"]),
        *(
            (
                {"devices": both},
                [f"devices must be groups that have no GPU in common, or all of them in the same order, got {both!r}"],
            )
            for both in ("cuda:0+cuda:1,cuda:1+cuda:2", "cuda:0+cuda:1,cuda:1+cuda:0", "cuda:0,cuda:0+cuda:1")
        ),
        ({"devices": "cpu+cpu"}, ["devices", "cuda:N+cuda:M"]),
        ({"devices": "cuda:0+cuda:1", "lora": "a=b"}, ["lora 'a=b' does not work with tensor_parallel 2"]),
        ({"devices": "none"}, ["devices", "worker_endpoint"]),
        ({"devices": "none", "worker_endpoint": "tcp://*:5600", "also": "a=b"}, ["devices", "also"]),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_a_remedy(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as failure:
        resolve(flags, {})
    for word in words:
        assert word in str(failure.value)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("PORT", "http", "a whole number"),
        ("PORT", "", "a whole number"),
        ("PORT", "80.5", "a whole number"),
        ("OVERLAP", "maybe", "true or false"),
        ("MAX_MODEL_LEN", "none", "a whole number"),
    ],
)
def test_a_bad_variable_is_named(name: str, text: str, wanted: str) -> None:
    with pytest.raises(SettingsError, match=f"TOKENYARD_{name} must be {wanted}, got '{text}'"):
        resolve({}, {f"TOKENYARD_{name}": text})


def test_a_bad_value_from_the_environment_says_so() -> None:
    with pytest.raises(SettingsError, match=r"port must be 1 to 65535, got 99999 \(from environment\)"):
        resolve({}, {"TOKENYARD_PORT": "99999"})


@pytest.mark.parametrize("name", sorted(GUARDS))
@pytest.mark.parametrize("text", ["", " "])
def test_a_guard_that_is_given_as_nothing_is_refused_whichever_way_it_comes(
    tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = "{text}"')
    ways: list[tuple[dict[str, str], dict[str, str], Path | None, str]] = [
        ({name: text}, {}, None, "command line"),
        ({}, {f"TOKENYARD_{name.upper()}": text}, None, "environment"),
        ({}, {}, file, f"file {file}"),
    ]
    for flags, environ, config, source in ways:
        with pytest.raises(SettingsError) as failure:
            resolve(flags, environ, config)
        assert str(failure.value) == f"{name} is empty (from {source}); give it a value, or leave the setting out"


def test_guards_are_all_that_say_who_may_do_what() -> None:
    assert {"api_key", "api_key_file", "admin_api_key", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"} <= GUARDS
    assert {"curve_keys", "worker_endpoint", "fetch_hosts"} <= GUARDS
    assert not GUARDS & {"model", "served_model_name", "logit_processors"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TOKENYARD_APIKEY", "TOKENYARD_API_KEY"),
        ("TOKENYARD_API_KEYS", "TOKENYARD_API_KEY"),
        ("TOKENYARD_ADMIN_KEY", "TOKENYARD_ADMIN_API_KEY"),
        ("TOKENYARD_SSL_CERT", "TOKENYARD_SSL_CERTFILE"),
        ("TOKENYARD_PROT", "TOKENYARD_PORT"),
        ("tokenyard_api_key", "TOKENYARD_API_KEY"),
        ("Tokenyard_Port", "TOKENYARD_PORT"),
        ("TOKENYARD-API-KEY", "TOKENYARD_API_KEY"),
        ("TOKENYARD_CONFIGURATION", "TOKENYARD_CONFIG"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_right_one(name: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"variable {name} is no setting; the nearest one is {nearest}:") as failure:
        resolve({}, {name: "a-secret"})
    assert "a-secret" not in str(failure.value)


def test_variables_that_are_ours_but_no_settings_are_left_alone() -> None:
    others = ["TOKENYARD_CONFIG", "TOKENYARD_SHM_WATERMARK", "TOKENYARD_TEST_FUZZ", "TOKENYARD_BENCH_JOBS"]
    environ = dict.fromkeys(
        [*others, SUPERVISOR_PID, STATUS_FD, FORKS, *WATERMARK_VARIABLES, "PATH", "XTOKENYARD_A"], "1"
    )
    assert resolve({}, environ).settings == Settings()


@pytest.mark.parametrize("service", ["TOKENYARD", "TOKENYARD_CHAT"])
def test_what_kubernetes_says_of_a_service_is_no_setting(service: str) -> None:
    environ = {f"{service}_SERVICE_HOST": "10.0.0.7", f"{service}_SERVICE_PORT": "80"}
    environ |= {f"{service}_SERVICE_PORT_HTTP": "80", f"{service}_PORT": "tcp://10.0.0.7:80"}
    environ |= {f"{service}_PORT_80_TCP": "tcp://10.0.0.7:80", f"{service}_PORT_80_TCP_ADDR": "10.0.0.7"}
    assert resolve({}, environ).settings == Settings()
    assert resolve({}, environ | {"TOKENYARD_PORT": "9000"}).settings.port == 9000
    with pytest.raises(SettingsError, match="TOKENYARD_API_KEI is no setting"):
        resolve({}, environ | {"TOKENYARD_API_KEI": "x"})


def test_an_empty_name_of_the_file_is_no_file() -> None:
    assert config_file({}) is None
    assert config_file({"TOKENYARD_CONFIG": "my.toml"}) == Path("my.toml")
    with pytest.raises(SettingsError, match="TOKENYARD_CONFIG is empty"):
        config_file({"TOKENYARD_CONFIG": ""})


@pytest.mark.parametrize("text", ["1", "true", "TRUE"])
def test_true_in_the_environment(text: str) -> None:
    assert resolve({"port": 1}, {"TOKENYARD_PREFIX_CACHE": text}).settings.prefix_cache is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prot = 80", "prot in .* is no setting; the settings are: model, host, port"),
        (b'port = "80"', "port in .* must be a whole number, got '80'"),
        (b"port = true", "port in .* must be a whole number, got True"),
        (b"overlap = 1", "overlap in .* must be true or false, got 1"),
        (b"max_audio_seconds = 1801", "max_audio_seconds must be 1 to 1800, got 1801"),
        (b"port = 70000", "port must be 1 to 65535, got 70000 .from file"),
        (b"port = ", "cannot be read"),
        (b"model = '\xff'", "cannot be read"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        resolve({}, {}, file)


@pytest.mark.parametrize("name", ["base", "./model", "other", "default", "tgi", "dummy"])
def test_an_adapter_has_a_name_that_means_only_it(name: str) -> None:
    given = {"model": "./model", "served_model_name": "base", "also": "other=/other"}
    with pytest.raises(SettingsError, match=f"lora must be .*{name}"):
        resolve(given | {"lora": f"{name}=/a"}, {})
    assert resolve(given | {"lora": "sql=/a"}, {}).settings.adapter_paths == {"sql": "/a"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml cannot be read: .*No such file"):
        resolve({}, {}, tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512MB", 512 * 10**6),
        ("512M", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("4 GB", 4 * 10**9),
        ("4gib", 4 * 2**30),
        ("0.5GiB", 2**29),
        ("3kb", 3000),
        ("2KiB", 2048),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "1TB", "1e9", "4 G B", "1.2.3G", "٣GB", "nan", "inf", "autoB"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match="kv_memory must be auto or a size"):
        parse_memory(text)


@given(st.text())
def test_any_text_is_a_size_or_an_explained_error(text: str) -> None:
    try:
        size = parse_memory(text)
    except SettingsError:
        return
    assert size is None or size >= 1


@pytest.mark.parametrize(
    ("model", "served", "public"),
    [("", "", "tokenyard-demo"), ("/models/tiny", "", "tiny"), ("org/name", "", "name"), ("org/name", "mine", "mine")],
)
def test_the_name_clients_use(model: str, served: str, public: str) -> None:
    assert Settings(model=model, served_model_name=served).public_model_name == public


def test_every_setting_explains_itself() -> None:
    for setting in dataclasses.fields(Settings):
        assert len(setting.metadata["help"]) > 20
        assert setting.metadata["group"]
        assert KINDS[setting.name] in (bool, int, str)


def test_a_gpu_takes_more_tokens_in_a_step() -> None:
    assert Settings().max_batch_tokens is None
    assert [step_tokens(None, memory << 30) for memory in (0, 24, 40, 80)] == [512, 2048, 8192, 8192]
    assert [step_tokens(100, memory << 30) for memory in (0, 80)] == [100, 100]


def test_a_gpu_computes_more_sequences_together() -> None:
    assert Settings().max_running is None
    assert [running_rows(None, devices) for devices in ("cpu", "none", "cpu,cuda:0", "cuda:0,cuda:1")] == [
        128,
        128,
        128,
        256,
    ]
    assert running_rows(7, "cuda:0") == 7
