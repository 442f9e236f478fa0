"""The further models of a server: each has a scheduler and workers of its own, with settings and a run directory that
follow from the server's.

The supervisor writes them, and the API processes find them again. Knows settings; knows no model's files.
"""

from __future__ import annotations

import dataclasses

from shared.endpoints import RunDirectory
from shared.settings import Settings


def of_further_models(settings: Settings, directory: RunDirectory) -> list[tuple[Settings, RunDirectory]]:
    """List the settings and run directories of the models of `also`, in their order."""
    models = settings.further_models.items()
    return [(_settings(settings, *model), directory.of_further_model(i)) for i, model in enumerate(models)]


def _settings(settings: Settings, name: str, model: str) -> Settings:
    """Return the server's settings, without those that are about the first model alone."""
    return dataclasses.replace(
        settings,
        model=model,
        served_model_name=name,
        also="",
        lora="",
        task="auto",
        quantization="none",
        max_model_len=None,
        max_batch_tokens=None,
        tool_parser="auto",
        reasoning_parser="auto",
        logit_processors="",
        worker_endpoint="",
        curve_keys="",
    )
