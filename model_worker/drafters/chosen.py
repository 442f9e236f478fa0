"""The drafters that a worker's setting names: `text`, `suffix`, and the folder or hub name of a model or head."""

from __future__ import annotations

from model_worker.drafters.base import Drafter
from model_worker.drafters.own_text import OwnText
from model_worker.drafters.suffix import EndedAnswers


def without_models(names: str) -> list[Drafter]:
    """Make those that run no model."""
    entries = _entries(names)
    kinds: list[type[OwnText] | type[EndedAnswers]] = [OwnText, EndedAnswers]
    return [kind() for kind in kinds if kind.name in entries]


def model_named(names: str) -> str | None:
    """Return the model or head that is named; None for none. ValueError for more than one."""
    models = [name for name in _entries(names) if name not in (OwnText.name, EndedAnswers.name)]
    if len(models) > 1:
        raise ValueError(f"draft names the models {', '.join(models)}, and one can guess: leave out the others")
    return models[0] if models else None


def _entries(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]
