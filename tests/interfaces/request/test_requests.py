"""What the requests take, convert and refuse."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from interfaces import (
    EmbeddingsGenerationRequest,
    ImageContentPart,
    ImageWishes,
    PixelGenerationRequest,
    Request,
    RequestID,
    SamplingParams,
    SamplingParamsInput,
    TextGenerationRequest,
    TextGenerationRequestMessage,
    TextGenerationResponseFormat,
    VideoWishes,
)

PICTURE = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}
CLIP = {"role": "user", "content": [{"type": "video"}]}


def request(**fields: Any) -> TextGenerationRequest:
    return TextGenerationRequest(RequestID("r"), "m", **fields)


def test_dicts_become_messages_and_none_an_empty_list() -> None:
    made = request(messages=[PICTURE, TextGenerationRequestMessage(role="assistant", content="A cat.")], images=[b"i"])
    assert [type(message) for message in made.messages] == [TextGenerationRequestMessage] * 2
    assert isinstance(made.messages[0].content[1], ImageContentPart)
    bare: dict[str, Any] = {"messages": None, "images": None, "videos": None}
    none = request(prompt="x", **bare)
    assert (none.messages, none.images, none.videos) == ([], [], [])


@pytest.mark.parametrize("wrong", ["hello", 5, ["user", "x"]])
def test_anything_else_is_no_message(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"messages\[1\] must be a message or a dict"):
        request(messages=[PICTURE, wrong])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": "x", "messages": [PICTURE]}, "prompt and messages exclude each other"),
        ({"prompt": [1], "messages": [PICTURE]}, "prompt and messages exclude each other"),
        (
            {"prompt": "x", "videos": [b"v"], "video_wishes": [VideoWishes(), VideoWishes()]},
            "video_wishes has 2 items for 1 videos",
        ),
        (
            {"prompt": "x", "images": [b"i"], "image_wishes": [ImageWishes(), ImageWishes()]},
            "image_wishes has 2 items for 1 images",
        ),
        ({"messages": [PICTURE], "images": [b"i", b"j"]}, "images has 2 items for 1 parts"),
        ({"messages": [CLIP], "videos": [b"v", b"w"]}, "videos has 2 items for 1 parts"),
        ({"messages": [CLIP], "images": [b"i"]}, "images has 1 items for 0 parts"),
        ({"prompt": "x", "n": 0}, "n must be at least 1, got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        request(**fields)


def test_what_may_go_together() -> None:
    assert request(prompt=[1, 2], images=[b"i"]).images == [b"i"]
    assert request(messages=[PICTURE]).number_of_images == 1
    assert request(messages=[PICTURE, CLIP, PICTURE], images=[b"i", b"j"]).number_of_videos == 1
    assert request(prompt="", messages=[PICTURE]).prompt == ""
    assert request().prompt is None


def test_the_older_keywords() -> None:
    old = request(prompt="x", index=3, lora_name="french", stop="END", sampling_params=SamplingParams(stop=["a"]))
    assert (old.index, old.lora_name, old.sampling_params.stop) == (3, "french", ["a", "END"])
    assert request(prompt="x", stop=["b", "c"], sampling=SamplingParamsInput()).sampling == SamplingParamsInput(
        stop=["b", "c"]
    )
    assert replace(old, index=4).sampling_params.stop == ["a", "END"]
    shaped = request(prompt="x", response_format={"type": "json_schema", "json_schema": {"type": "object"}})
    assert shaped.response_format == TextGenerationResponseFormat("json_schema", {"type": "object"})


def test_a_request_is_its_name_and_cannot_be_changed() -> None:
    plain: Any = "abc"
    made = TextGenerationRequest(request_id=plain, model_name="m", prompt="x")
    assert type(made.request_id) is RequestID
    assert str(made) == "abc"
    assert isinstance(made, Request)
    with pytest.raises(FrozenInstanceError):
        made.prompt = "y"  # type: ignore[misc]


def test_the_callers_sampling_values_stay_as_they_are() -> None:
    params = SamplingParams(stop=["a"])
    request(prompt="x", stop="b", sampling_params=params)
    assert params.stop == ["a"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input": ""}, "input must not be empty"),
        ({"input": []}, "input must not be empty"),
        ({"dimensions": 0}, "dimensions must be at least 1, got 0"),
        ({"truncate_to": -1}, "truncate_to must be at least 1, got -1"),
    ],
)
def test_embeddings_requests(fields: Any, why: str) -> None:
    good: dict[str, Any] = {"request_id": "e", "model_name": "m", "input": "text"}
    assert str(EmbeddingsGenerationRequest(**good)) == "e"
    with pytest.raises(ValueError, match=why):
        EmbeddingsGenerationRequest(**(good | fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"height": 0}, "height must be at least 1, got 0"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt must be at least 1"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be at least 0 and finite, got nan"),
        ({"guidance_scale": -1.0}, "guidance_scale must be at least 0"),
    ],
)
def test_pixel_requests(fields: Any, why: str) -> None:
    good: dict[str, Any] = {"request_id": "p", "model_name": "m", "prompt": "a cat"}
    assert isinstance(PixelGenerationRequest(**good), Request)
    with pytest.raises(ValueError, match=why):
        PixelGenerationRequest(**(good | fields))
