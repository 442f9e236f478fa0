"""Adapters that are loaded and unloaded while the model runs: the operations and their answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

LORA_REQUEST_ENDPOINT = "lora_request"
LORA_RESPONSE_ENDPOINT = "lora_response"


class LoRAType(enum.Enum):
    """The kinds of weights in an adapter, by the names they have there."""

    A = "lora_A"
    B = "lora_B"
    B_KV = "lora_B_kv"
    BIAS = "lora.bias"


class LoRAOperation(enum.Enum):
    """An operation on an adapter."""

    LOAD = "load"
    UNLOAD = "unload"


class LoRAStatus(enum.Enum):
    """The outcome of an operation."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    UNSPECIFIED_ERROR = "unspecified_error"


@dataclass
class LoRARequest:
    """An operation on the adapter `lora_name`; `lora_path` is where to load it from."""

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None


@dataclass
class LoRAResponse:
    """The answer to an operation."""

    status: LoRAStatus
    message: str | list[str]
