"""Bodies that carry texts, in OpenAI's and vLLM's form: their common fields, limits and reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from api_server.body import item_limits, unknown_fields
from api_server.body.unknown_fields import ALWAYS, Refusals, unless
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai.schema import LONGEST_NAME, Body, TokenIds
from api_server.errors import invalid
from api_server.pooling.reading import MOST_TEXTS, Item, Reading
from api_server.web.endpoint import Call

Input = str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]

B = TypeVar("B", bound="TextsBody")

# How a client asks for truncation, for errors.
_TRUNCATION = "truncate_prompt_tokens: -1, which cuts it"


class TextsBody(Body):
    model: str | None = Field(None, description="The served model's name, or nothing")
    user: str | None = Field(None, max_length=LONGEST_NAME, description="Accepted, without effect")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Cut texts to so many tokens; -1: to what the model takes. Without it, long texts fail"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The side that is cut; default right")
    add_special_tokens: bool = Field(True, description="Add the tokens that the model expects around a text")


class TextsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


# Fields that this server does not implement.
_REFUSED: Refusals = {
    "embed_dtype": ("a type of numbers other than float32", unless(None, "float32")),
    "endianness": ("an order of bytes other than little-endian", unless(None, "native", "little")),
    "mm_processor_kwargs": ("images", unless(None, {})),
    "chat_template": ("a template sent by a client", ALWAYS),
    "continue_final_message": ("continuing the last message", unless(None, False)),
    "lora_path": ("adapters", ALWAYS),
}
# Known fields that change no answer here.
_WITHOUT_EFFECT = frozenset({"request_id", "cache_salt", "metadata"})


def read(call: Call, model: type[B], field: str) -> B:
    """Reads and checks a body whose texts are in `field`. Raises RequestFailed."""
    unknown_fields.check(call.json, model, _REFUSED, _WITHOUT_EFFECT)
    check_input(call.json.get(field), field)
    try:
        body = parse(model, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
    call.server.check_model(body.model or "")
    return body


def check_input(given: Any, field: str) -> None:
    """Raises RequestFailed for too many texts, an empty list, an empty text or a text without tokens."""
    if isinstance(given, list) and not given:
        raise invalid(f"{field} must not be empty", field)
    items = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
    item_limits.check_count(len(items), "texts", field, MOST_TEXTS)
    for i, item in enumerate(items):
        if isinstance(item, str | list) and not item:
            where = f"{field}[{i}]" if items is given else field
            raise invalid(f"{where} must not be empty: leave empty texts out", field)


def is_list(given: Input) -> bool:
    """True for a list of texts, False for one text, as characters or as token ids."""
    return isinstance(given, list) and not isinstance(given[0], int)


def items_of(given: Input) -> Sequence[Item]:
    items: Any = given if is_list(given) else [given]
    return list(items)


def reading_of(body: TextsBody, field: str, listed: bool = True, prompt_name: str | None = None) -> Reading:
    most = body.truncate_prompt_tokens
    if most == 0:
        where = "truncate_prompt_tokens"
        raise invalid(f"{where} must be at least 1, or -1 for the model's own limit, got 0", where)
    return Reading(
        field=field,
        truncate=most is not None,
        most_tokens=most if most is not None and most > 0 else None,
        keep_end=body.truncation_side == "left",
        add_special_tokens=body.add_special_tokens,
        prompt_name=prompt_name,
        remedy=_TRUNCATION,
        listed=listed,
    )
