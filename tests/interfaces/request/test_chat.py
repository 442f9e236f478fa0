"""Messages and their parts: what is taken for them, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from interfaces.request.chat import (
    ImageContentPart,
    TextContentPart,
    TextGenerationRequestMessage,
    TextGenerationResponseFormat,
    VideoContentPart,
)


def message(content: Any, role: Any = "user", **more: Any) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage(role=role, content=content, **more)


def test_content_is_normalised() -> None:
    assert message(None).content == ""
    assert message("x").content == "x"
    part = TextContentPart(text="a")
    given = [part, {"type": "text", "text": "b"}, {"type": "text", "content": "c"}, {"type": "text"}, {"type": "image"}]
    texts = [TextContentPart(text=text) for text in ("a", "b", "c", "")]
    assert message([*given, {"type": "video"}]).content == [*texts, ImageContentPart(), VideoContentPart()]
    assert message([part]).content[0] is part


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (5, "content"),
        ({"type": "text"}, "content"),
        (["x"], r"content\[0\] must be an object with a type, got str"),
        ([{"text": "x"}], r"content\[0\].type must be text, image, video or audio, got None"),
        ([{"type": "text", "text": "x"}, {"type": "sound"}], r"content\[1\].type must be .* got 'sound'"),
        ([{"type": "text", "text": 5}], r"content\[0\].text must be a text, got int"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"content\[0\] is a image_url: load it"),
        ([{"type": "video_url"}], r"content\[0\] is a video_url: load it"),
    ],
)
def test_other_content_is_refused(content: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        message(content)


def test_roles() -> None:
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert message("x", role).role == role
    with pytest.raises(ValidationError, match="role"):
        message("x", "king")


def test_a_message_cannot_be_changed_and_keeps_further_keys() -> None:
    named = message("x", name="Ada")
    assert named.model_dump(exclude_none=True) == {"role": "user", "content": "x", "name": "Ada"}
    with pytest.raises(ValidationError, match="frozen"):
        named.role = "system"  # type: ignore[misc]


def test_flatten_content_joins_texts_and_keeps_what_is_set() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    both = message([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "assistant", tool_calls=[call])
    assert both.flatten_content() == {"role": "assistant", "content": "a\nb", "tool_calls": [call]}
    answer = message("4", "tool", tool_call_id="1", reasoning_content="2 + 2")
    assert answer.flatten_content() == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "1",
        "reasoning_content": "2 + 2",
    }
    with pytest.raises(ValueError, match=r"content\[1\] is of type 'image'"):
        message([{"type": "text", "text": "a"}, {"type": "image"}]).flatten_content()


def test_parts_are_counted_by_kind() -> None:
    mixed = message([{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}])
    assert (mixed.count(ImageContentPart), mixed.count(TextContentPart), mixed.count(VideoContentPart)) == (2, 1, 0)
    assert message("image").count(ImageContentPart) == 0


def test_a_response_format_may_come_as_the_older_mapping() -> None:
    of = TextGenerationResponseFormat.of({"type": "json_schema", "json_schema": {"type": "object"}})
    assert of == TextGenerationResponseFormat("json_schema", {"type": "object"})
    assert TextGenerationResponseFormat.of(of) is of
