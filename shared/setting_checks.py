"""The checks of settings that end in an error with name, value and remedy, and the words that some settings may be.

Knows texts and names of settings. Does not know the settings themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shared.adapter_paths import named_paths
from shared.fetch_hosts import FetchHosts
from shared.setting_forms import bytes_of, ranks_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
TASKS = (
    *("auto", "generate", "embed", "embed_tokens", "sparse", "rerank", "classify", "classify_tokens"),
    *("speak", "paint"),
)
QUANTIZATIONS = ("none", "int8")
KV_DTYPES = ("auto", "int8", "fp8")
FURTHER_MODELS = "a list of NAME=MODEL with a name of its own for each (letters, digits and ./-_)"
# The least values of numbers that have no greatest one, or whose greatest one is checked elsewhere.
LEAST = {
    **dict.fromkeys(("api_servers", "max_running", "max_queued", "max_queued_tokens", "max_best_of"), 1),
    "stall_timeout": 1,
    "max_batch_tokens": 1,
    "max_model_len": 2,
    "max_image_tokens": 16,
    "max_video_tokens": 16,
}
# The least and greatest values of other numbers.
RANGES = {
    "keep_alive_timeout": (1, 3600),
    "drain_delay": (0, 3600),
    "drain_timeout": (0, 3600),
    "max_audio_seconds": (1, 1800),
    "limit_images": (0, 1024),
    "tensor_parallel": (1, 16),
}
# What a group of ranks does not do, by setting: the values with which the setting asks for nothing of it.
_ALONE: Mapping[str, Collection[object]] = {
    "quantization": ("none",),
    "kv_dtype": ("auto",),
    "speculate": (0, "0"),
    "lora": ("",),
    "lora_dirs": ("",),
    "weights_dirs": ("",),
    "task": ("auto", "generate"),
    "kv_spill": ("0",),
    "weight_keeper": (False,),
}
LOG_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """A setting that cannot be used; the text names the setting, its value, where it came from and the remedy."""


def check(holds: bool, name: str, value: object, valid: str) -> None:
    """Raise SettingsError unless the value holds."""
    if not holds:
        raise SettingsError(f"{name} must be {valid}, got {value!r}")


def check_group(ranks: int, values: Mapping[str, object]) -> None:
    """Raise SettingsError for a setting that does not work where a worker is a group of ranks."""
    devices = str(values["devices"])
    for group in devices.split(","):
        names = group.split("+")
        check(len(set(names)) == len(names), "devices", devices, "groups of different GPUs")
        # Workers of the same GPUs share their memory. Of groups that overlap none knows what the other one takes.
        alone = all(other == group or not {*names} & {*other.split("+")} for other in devices.split(","))
        check(alone, "devices", devices, "groups that have no GPU in common, or all of them in the same order")
    if ranks == 1 and "+" in devices:
        # The number is taken from the devices where it is not given.
        sizes = ranks_of(devices)
        check(len(sizes) == 1, "devices", devices, "workers with as many GPUs each")
        check_group(sizes.pop(), values)
        return
    if ranks == 1:
        return
    for name, allowed in _ALONE.items():
        if values[name] not in allowed:
            [first, *_] = allowed
            raise SettingsError(
                f"{name} {values[name]!r} does not work with tensor_parallel {ranks}: "
                f"use {name} {first!r}, or leave tensor_parallel out"
            )
    if "cuda" in devices and ranks_of(devices) != {ranks}:
        group = "+".join(f"cuda:{rank}" for rank in range(ranks))
        raise SettingsError(
            f"devices {devices!r} does not work with tensor_parallel {ranks}: name {ranks} GPUs for each worker, such "
            f"as devices {group}, or leave tensor_parallel out"
        )


def parse_memory(text: str, name: str = "kv_memory") -> int | None:
    """Parse `512MB`, `4GiB`, `2000000` to bytes; None for `auto`. Raises SettingsError."""
    size = None if text == "auto" else bytes_of(text)
    if size == 0:
        raise SettingsError(f"{name} must be auto or a size such as 512MB or 4GB, got {text!r}")
    return size


def check_spill(size: str, folder: str, devices: str, prefix_cache: bool) -> None:
    """Raise SettingsError unless `kv_spill` and `kv_spill_dir` fit each other and the other settings."""
    check(size != "auto", "kv_spill", size, "0, or a size such as 20GB")
    if not bytes_of(size):
        check(size == "0", "kv_spill", size, "0, or a size such as 20GB")
        check(not folder, "kv_spill_dir", folder, "used with kv_spill")
        return
    check(prefix_cache, "kv_spill", size, "used with prefix_cache, by which blocks are found")
    check(bool(folder) or "cpu" not in devices, "kv_spill", size, "used with kv_spill_dir on a CPU")


def check_adapters(text: str, taken: Collection[str]) -> None:
    """Raise SettingsError unless `lora` names folders, by names that are not taken."""
    try:
        names = named_paths(text)
    except ValueError as error:
        raise SettingsError(f"lora must be {error}") from None
    both = sorted(names.keys() & set(taken))
    check(not both, "lora", ", ".join(both), "names that no model has")


def check_hosts(text: str) -> None:
    """Raise SettingsError unless `fetch_hosts` can be read."""
    try:
        FetchHosts.parse(text)
    except ValueError as error:
        valid = "names (docs.example.com), *.SUFFIX, addresses or networks (10.1.0.0/16), with commas"
        raise SettingsError(f"fetch_hosts must be {valid}, got {str(error)!r}") from None
