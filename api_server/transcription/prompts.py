"""The tokens that a transcript begins with, and the rules that it is held to.

Knows a recogniser's files and its languages. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from api_server.errors import invalid
from shared.recogniser_files import RULES, RecogniserFiles


@cache
def _languages() -> dict[str, str]:
    """The English name of each language, by its code."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)


@cache
def _codes() -> dict[str, str]:
    """The code of each language, by its English names."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return dict(TO_LANGUAGE_CODE)


def language_name(code: str) -> str:
    """The English name of a language, as OpenAI's answers have it."""
    return _languages().get(code, code)


def language_code(known: Mapping[str, int], given: str, field: str) -> str:
    """The code of a language among those that the model knows, by code; empty: it is not said which. Raises
    RequestFailed(INVALID)."""
    wanted = given.strip().lower()
    code = wanted if wanted in _languages() else _codes().get(wanted, wanted)
    possible = known or _languages()
    if code not in possible:
        some = ", ".join(list(possible)[:10])
        raise invalid(
            f"{field} must be a language that this model knows, such as {some}, as its code or its English name; got "
            f"{given!r:.60}",
            field,
        )
    return code


def prompt_of(
    files: RecogniserFiles, language: str | None, task: str, previous: list[int], timestamps: bool
) -> list[int]:
    """The tokens before a transcript. `previous` is text that went before it, of which the end counts."""
    tokens = []
    if previous and files.previous is not None:
        tokens = [files.previous, *previous[-(files.target_positions // 2 - 1) :]]
    tokens.append(files.start)
    if language is not None and language in files.languages:
        tokens.append(files.languages[language])
    if task in files.tasks:
        tokens.append(files.tasks[task])
    if not timestamps and files.no_timestamps is not None:
        tokens.append(files.no_timestamps)
    return tokens


def rules_of(files: RecogniserFiles, timestamps: bool) -> dict[str, str]:
    """The logits processor that holds a transcript to its rules, with its parameters."""
    parameters: dict[str, object] = {
        "suppressed": list(files.suppressed),
        "suppressed_at_begin": list(files.suppressed_at_begin),
    }
    if timestamps and files.no_timestamps is not None:
        parameters |= {"first_timestamp": files.first_timestamp, "end": files.end}
        if files.latest_first is not None:
            parameters["latest_first"] = files.latest_first
    return {RULES: json.dumps(parameters)}
