"""An image on its way as bytes: what its steps have changed, by which another worker goes on with it.

All else follows from the image's context, and is made again. The bytes are a file of safetensors, whose tensors and
one text of JSON are data and nothing else. Knows canvases and schedules; knows no messages.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from model_worker.pixels.canvas import Canvas

# Bytes of an image that is kept at most: a larger one begins again when its worker is lost.
MOST_BYTES = 32 << 20
# The tensor that holds the text.
_TEXT = "text"
# The configuration of a schedule, which its steps do not change.
_CONFIG = "_internal_dict"


def packed(canvas: Canvas) -> bytes | None:
    """Return what the steps have changed; None where it is too large, or a schedule holds what is no data."""
    tensors: dict[str, Tensor] = {}
    schedule = {name: value for name, value in vars(canvas.scheduler).items() if name != _CONFIG}
    try:
        state = {
            "taken": canvas.taken,
            "latents": _form(canvas.latents, tensors),
            "expected": _form(canvas.expected, tensors),
            "generator": _form(canvas.generator.get_state(), tensors),
            "schedule": {name: _form(value, tensors) for name, value in schedule.items()},
        }
        text = orjson.dumps(state)
        if sum(tensor.nbytes for tensor in tensors.values()) + len(text) > MOST_BYTES:
            return None
        return safetensors.torch.save({**tensors, _TEXT: torch.frombuffer(bytearray(text), dtype=torch.uint8)})
    except (TypeError, ValueError, RuntimeError, SafetensorError):
        return None


def restore(canvas: Canvas, kept: bytes) -> None:
    """Let an image that has just begun go on where another worker was. ValueError for what that did not write."""
    try:
        tensors = safetensors.torch.load(kept)
        state = orjson.loads(tensors.pop(_TEXT).numpy().tobytes())
        latents, expected, generator = (
            _value(state[name], tensors, canvas.latents.device) for name in ("latents", "expected", "generator")
        )
        schedule = {name: _value(form, tensors, canvas.latents.device) for name, form in state["schedule"].items()}
        taken = int(state["taken"])
        fits = latents.shape == expected.shape == canvas.latents.shape and 0 < taken < canvas.passes
        if not fits or not _is_of(canvas.scheduler, set(schedule)):
            raise ValueError("it belongs to another image")
        canvas.generator.set_state(generator)
    except (SafetensorError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the kept step cannot be read: {error}") from error
    vars(canvas.scheduler).update(schedule)
    canvas.latents, canvas.expected = latents.to(canvas.latents.dtype), expected.to(canvas.latents.dtype)
    canvas.taken = taken


def _is_of(scheduler: Any, names: set[str]) -> bool:
    """Whether the values of these names are those of a schedule: all that it began with, and some that steps add."""
    begun = set(vars(scheduler)) - {_CONFIG}
    return begun <= names and not any(name == _CONFIG or hasattr(type(scheduler), name) for name in names - begun)


def _form(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON has it, whose tensors are `tensors` by name. TypeError for what is no data."""
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name, "beside": value.device.type == "cpu"}
        case np.ndarray():
            return {"array": _form(torch.from_numpy(np.ascontiguousarray(value)), tensors)["tensor"]}
        case np.generic():
            return value.item()
        case list() | tuple():
            return [_form(each, tensors) for each in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
    raise TypeError(f"{type(value).__name__} is no data")


def _value(form: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """Return the value of a form."""
    match form:
        case {"tensor": name, "beside": beside}:
            return tensors[name] if beside else tensors[name].to(device)
        case {"array": name}:
            return tensors[name].numpy()
        case list():
            return [_value(each, tensors, device) for each in form]
    return form
