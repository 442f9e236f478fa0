"""Files of a model beside its tokenizer: generation_config.json, and the chat template of an older processor.

generation_config.json is read as transformers' generate reads it: values that it would refuse are refused here, too,
when the server starts, and those that change nothing for it change nothing here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from interfaces import SamplingParamsGenerationConfigDefaults
from shared.gguf.file import open_gguf
from shared.gguf.format import is_gguf
from shared.gguf.special_tokens import end_tokens
from shared.json_files import read_json_file
from shared.tokenizer_files import file_of, read_json

log = logging.getLogger("tokenyard")

_FILE = "generation_config.json"
# Counts above this mean "as many as there are".
_MOST = (1 << 31) - 1


def eos_ids(tokenizer: Any, config: dict[str, Any], vocab_size: int) -> list[int]:
    """The tokens that end an answer: the tokenizer's and those of the config, as far as there are such tokens.

    Raises ValueError for something else than token ids.
    """
    configured = config.get("eos_token_id")
    listed = configured if isinstance(configured, list) else [] if configured is None else [configured]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(
                f"{_FILE} (or config.json) has eos_token_id {configured!r}, which must be a token id or a list of ids"
            )
    found = [token for token in (tokenizer.eos_token_id, *listed) if token is not None]
    if beyond := [token for token in found if not 0 <= token < vocab_size]:
        log.warning("end tokens %s are beyond the vocabulary of %d tokens: they are ignored", beyond, vocab_size)
    return list(dict.fromkeys(token for token in found if 0 <= token < vocab_size))


def defaults(config: dict[str, Any], eos: list[int]) -> SamplingParamsGenerationConfigDefaults:
    """Values of the file itself; transformers' own class defaults are left out.

    Raises ValueError, which names the file, the field and the value.
    """
    given: dict[str, Any] = {}
    for name, read in _FIELDS.items():
        value = config.get(name)
        if value is None:
            continue
        kept, valid = read(value)
        if valid:
            raise ValueError(f"{_FILE} has {name} {value!r}, which must be {valid}: correct the file")
        if kept is not None:
            given[name] = kept
    return SamplingParamsGenerationConfigDefaults(**given, eos_token_id=eos)


# A value as it is kept (None: it changes nothing), and what it must be where it cannot be used.
_Read = tuple[Any, str]


def _number(value: Any) -> float:
    """The value as a number; NaN, which is within no bounds, for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _temperature(value: Any) -> _Read:
    number = _number(value)
    return number, "" if number >= 0 else "a number of at least 0"


def _top_p(value: Any) -> _Read:
    """A share of probability: from 1 on it leaves out nothing."""
    number = _number(value)
    return number if number < 1 else None, "" if number >= 0 else "a number between 0 and 1"


def _min_p(value: Any) -> _Read:
    number = _number(value)
    return number or None, "" if 0 <= number <= 1 else "a number between 0 and 1"


def _typical_p(value: Any) -> _Read:
    number = _number(value)
    return number if number < 1 else None, "" if number > 0 else "a number above 0 and at most 1"


def _count(least: int) -> Callable[[Any], _Read]:
    def read(value: Any) -> _Read:
        number = _number(value)
        fits = number >= least and number.is_integer()
        return min(int(number), _MOST) if fits else None, "" if fits else f"a whole number of at least {least}"

    return read


def _penalty(value: Any) -> _Read:
    number = _number(value)
    return number, "" if number > 0 else "a number above 0"


def _flag(value: Any) -> _Read:
    return value, "" if isinstance(value, bool) else "true or false"


_FIELDS: Mapping[str, Callable[[Any], _Read]] = {
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _count(0),
    "min_p": _min_p,
    "typical_p": _typical_p,
    "repetition_penalty": _penalty,
    "max_new_tokens": _count(1),
    "min_new_tokens": _count(0),
    "do_sample": _flag,
}


def read_generation_config(model: str) -> dict[str, Any]:
    """The values of generation_config.json; end tokens are config.json's where that file names none.

    A GGUF file has end tokens only.
    """
    if is_gguf(model):
        return {"eos_token_id": end_tokens(open_gguf(model))}
    path = file_of(model, _FILE)
    config: dict[str, Any] = {}
    if path is not None:
        try:
            found = read_json_file(path)
        except (OSError, ValueError) as error:
            log.warning("%s of %s is ignored: %s", _FILE, model, error)
            found = {}
        config = found if isinstance(found, dict) else {}
    if config.get("eos_token_id") is None:
        config["eos_token_id"] = _end_of_config(read_json(model, "config.json"))
    return config


def _end_of_config(config: dict[str, Any]) -> Any:
    """The end tokens of config.json, which a composite model has in its text model's part."""
    text = config.get("text_config")
    nested = text.get("eos_token_id") if isinstance(text, dict) else None
    return nested if config.get("eos_token_id") is None else config["eos_token_id"]


def processor_template(model: str) -> str | dict[str, str] | None:
    """The chat template of the model's processor, in the older file that tokenizers do not read; several by name."""
    path = file_of(model, "chat_template.json")
    if path is None:
        return None
    try:
        found = read_json_file(path)["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("chat_template.json of %s is ignored: %s", model, error)
        return None
    if isinstance(found, list):
        try:
            return {str(each["name"]): str(each["template"]) for each in found}
        except (KeyError, TypeError) as error:
            log.warning("chat_template.json of %s is ignored: its list has no %s", model, error)
            return None
    return found if isinstance(found, str) else None
