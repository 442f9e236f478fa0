"""A conversation in place of texts: the common fields of bodies that a model computes without generating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from api_server.body import item_limits
from api_server.body.item_limits import Turns
from api_server.chat import documents
from api_server.chat.messages import chat_messages
from api_server.dialects.openai import texts
from api_server.errors import invalid
from api_server.pooling.reading import MOST_TEXTS, Item, Reading
from api_server.web.endpoint import Call
from interfaces import RequestID, TextGenerationRequest

B = TypeVar("B", bound="InputOrMessages")


class InputOrMessages(texts.TextsBody):
    input: texts.Input | None = Field(
        None, description=f"A text, its token ids, or a list of either, at most {MOST_TEXTS}; none of them empty"
    )
    messages: Annotated[Turns, Field(min_length=1)] | None = Field(
        None, description="Instead of input: a conversation, whose form the model's chat template gives"
    )
    add_generation_prompt: bool | None = Field(None, description="For messages: open the assistant's turn")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For messages: variables of the template")


def read(call: Call, model: type[B]) -> B:
    """Reads and checks a body with either. Raises RequestFailed."""
    body = texts.read(call, model, "input")
    if (body.input is None) == (body.messages is None):
        raise invalid("exactly one of input and messages must be given", "input")
    return body


async def read_items(call: Call, body: InputOrMessages, prompt_name: str | None) -> tuple[Sequence[Item], Reading]:
    """The texts of a body, and how they are to be read. Raises RequestFailed."""
    given = body.input
    if given is None:
        return [await _token_ids(call, body)], texts.reading_of(body, "messages", False, prompt_name)
    return texts.items_of(given), texts.reading_of(body, "input", texts.is_list(given), prompt_name)


async def _token_ids(call: Call, body: InputOrMessages) -> list[int]:
    """The token ids of a conversation."""
    await call.apart(lambda: item_limits.check_parts(body.messages or (), "messages"))
    await documents.load(call.server.url_fetcher, body.messages or (), "messages", documents.file_part)
    messages = await call.apart(lambda: chat_messages(body.messages or ()))
    request = TextGenerationRequest(
        RequestID(call.request_id),
        messages=messages,
        chat_template_options=body.chat_template_kwargs or {},
        add_generation_prompt=bool(body.add_generation_prompt),
        add_special_tokens=body.add_special_tokens if "add_special_tokens" in body.model_fields_set else None,
    )
    ids: list[int] = (await call.server.tokenizer.prompt(request, None)).tokens.tolist()
    return ids
