"""The forms that texts of settings may have: lists of models, devices and origins, endpoints, and sizes.

Knows texts. Does not know settings, nor whether what a text names is there.
"""

from __future__ import annotations

import re

# The most tokens of a sequence that a pass may guess.
MOST_GUESSES = 15
# Tokens in a step, where the operator sets no other number: a GPU computes thousands in the time of one. What they take
# beside the weights is much of a small one's memory.
STEP_TOKENS = 512
_GPU_STEP_TOKENS = 8192
_SMALL_GPU_STEP_TOKENS = 2048
_SMALL_GPU = 40 << 30
# Sequences computed together, where the operator sets no other number.
_ROWS = 128
_GPU_ROWS = 256
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def are_models(text: str, first: str) -> bool:
    entries = [entry for entry in text.split(",") if entry]
    names = [entry.partition("=")[0].strip() for entry in entries]
    return len({first, *names}) == 1 + len(names) and all(re.fullmatch(r" *[\w./-]+ *=.*\S.*", e) for e in entries)


def entries(text: str) -> list[str]:
    return [entry for entry in text.replace(" ", "").split(",") if entry]


def is_tcp(text: str) -> bool:
    return re.fullmatch(r"tcp://(\*|[\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}", text, re.ASCII) is not None


def host_and_port(text: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT; an IPv6 address stands in brackets. The port is 0 for what is none."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if re.fullmatch("[0-9]{1,5}", port, re.ASCII) else 0


def are_origins(text: str) -> bool:
    """Whether these are origins as browsers send them; `null` is the origin of pages without an address."""
    origin = r"null|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+"
    return text in ("auto", "none", "*") or all(re.fullmatch(origin, part.strip()) for part in text.split(","))


def are_devices(text: str) -> bool:
    form = r"cpu|cuda:[0-9]+(\+cuda:[0-9]+)*"
    return text in ("auto", "none") or all(re.fullmatch(form, device) for device in text.split(","))


def ranks_of(devices: str) -> set[int]:
    """Return how many GPUs the workers of a setting have, each of one or more."""
    return {device.count("+") + 1 for device in devices.split(",")}


def devices_of_ranks(device: str, ranks: int) -> list[str]:
    """Return the device of each rank of a worker on `device`: its GPUs one by one, or the CPU for all."""
    names = device.split("+")
    return names if len(names) > 1 else names * ranks


def local_devices(devices: str) -> list[str]:
    """Return the devices of this machine, one for each worker, of a setting in which `auto` is resolved."""
    return [] if devices == "none" else devices.split(",")


def step_tokens(given: int | None, gpu_memory: int) -> int:
    """Return the most tokens of a worker's step: those that are given, or what suits a GPU of so many bytes, or a CPU,
    which has 0."""
    if given or not gpu_memory:
        return given or STEP_TOKENS
    return _GPU_STEP_TOKENS if gpu_memory >= _SMALL_GPU else _SMALL_GPU_STEP_TOKENS


def running_rows(given: int | None, devices: str) -> int:
    """Return the most sequences that a worker computes together: those that are given, or what suits the devices."""
    return given or (_GPU_ROWS if _on_gpus(devices) else _ROWS)


def _on_gpus(devices: str) -> bool:
    return all(device.startswith("cuda") for device in devices.split(","))


def bytes_of(size: str) -> int:
    """Return the bytes of a size such as 512MB or 4GiB; 0 for what is none."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([KMG]I?|)B?", size.upper())
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def guesses_of(speculate: str) -> int:
    """Return the most guesses of a sequence, for a number or auto; -1 for what is neither."""
    if speculate == "auto":
        return MOST_GUESSES
    return int(speculate) if speculate.isdecimal() and int(speculate) <= MOST_GUESSES else -1
