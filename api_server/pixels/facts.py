"""What clients want to know of a model that paints. Knows its files and settings; knows no dialect."""

from __future__ import annotations

from typing import Any

from api_server.state import ServerState


def paint_facts(server: ServerState) -> dict[str, Any] | None:
    """The model's name, the defaults of the fields of a request, and what an image of the client is; None if the model
    does not paint."""
    if server.pooled_model is None or server.pooled_model.pixels is None:
        return None
    pixels = server.pooled_model.pixels
    height, width = pixels.default_size
    return {
        "model": server.model_name,
        "size": f"{width}x{height}",
        "num_inference_steps": pixels.default_steps,
        "guidance_scale": pixels.default_guidance,
        "strength": pixels.family.strength,
        "original": pixels.family.original,
        "loras": list(server.settings.adapter_paths),
    }
