"""The Responses API's bodies and answers."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from interfaces import (
    GenerationOutput,
    GenerationStatus,
    OpenResponsesRequest,
    OpenResponsesRequestBody,
    Request,
    RequestID,
    ResponseResource,
)
from interfaces.pipelines.generation_output import OutputImageContent, OutputTextContent, OutputVideoContent, Usage


def body(**fields: Any) -> OpenResponsesRequestBody:
    return OpenResponsesRequestBody.model_validate({"model": "m", "input": "hi"} | fields)


class Http:
    """As much of a framework's request as is needed."""

    def __init__(self, document: Any, **state: Any) -> None:
        self.state = SimpleNamespace(**state)
        self._document = document

    async def json(self) -> Any:
        return self._document


async def test_a_request_is_a_body_with_a_name() -> None:
    made = await OpenResponsesRequest.from_fastapi_request(Http({"model": "m", "input": "hi"}, request_id="r1"))
    assert (str(made), made.body.input) == ("r1", "hi")
    assert isinstance(made, Request)
    with pytest.raises(ValueError, match="request_id is missing"):
        await OpenResponsesRequest.from_fastapi_request(Http({"model": "m", "input": "hi"}))
    with pytest.raises(ValueError, match="input"):
        await OpenResponsesRequest.from_fastapi_request(Http({"model": "m"}, request_id="r1"))


def test_unknown_keys_are_ignored_but_not_among_the_options() -> None:
    assert body(shiny=True, stream=True, stream_options={"include_usage": True}).stream is True
    with pytest.raises(ValidationError, match=r"provider_options\.image\.stepz"):
        body(provider_options={"image": {"stepz": 4}})
    with pytest.raises(ValidationError, match=r"provider_options\.sound"):
        body(provider_options={"sound": {}})


def test_a_conversation_with_parts_and_tools() -> None:
    made = body(
        input=[
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is it?"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                ],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
        response_format={"type": "json_schema", "json_schema": {"type": "object"}},
        reasoning={"effort": "low"},
    )
    assert [type(message).__name__ for message in made.input] == ["SystemMessage", "UserMessage", "AssistantMessage"]
    assert made.model_dump(exclude_none=True)["tool_choice"] == {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 0}, "n"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"include": ["everything"]}, "include"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"provider_options": {"image": {"width": 100}}}, "provider_options.image.width"),
        ({"provider_options": {"image": {"height": 130}}}, "provider_options.image.height"),
        ({"provider_options": {"image": {"strength": 0}}}, "provider_options.image.strength"),
        ({"provider_options": {"video": {"guidance_scale": -1}}}, "provider_options.video.guidance_scale"),
    ],
)
def test_values_out_of_range_are_refused_with_their_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        body(**fields)
    paths = {".".join(str(step) for step in error["loc"]) for error in refusal.value.errors()}
    assert any(each.startswith(path) for each in paths)


def test_images_have_options_by_default() -> None:
    image = body().provider_options.image
    assert (image.guidance_scale, image.strength, image.output_format, image.response_format) == (
        3.5,
        0.6,
        "jpeg",
        "b64_json",
    )


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 1), (7, 5, 3), (7, 5, 4), (1, 1, 3)])
def test_pixels_become_png(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng().integers(0, 256, shape, np.uint8)
    made = OutputImageContent.from_numpy(pixels, detail="low")
    assert (made.format, made.detail, made.image_url) == ("png", "low", None)
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(made.image_data or ""))))
    assert np.array_equal(found, pixels.reshape(found.shape))


def test_what_is_no_picture_is_refused() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match="format must be 'png'"):
        OutputImageContent.from_numpy(picture, format="jpeg")
    for wrong in (
        picture.astype(np.float32),
        picture[0, 0],
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((0, 2, 3), np.uint8),
    ):
        with pytest.raises(ValueError, match="an image must be uint8"):
            OutputImageContent.from_numpy(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frames must be uint8"):
        OutputVideoContent.from_numpy_frames(picture)


def test_an_answer_is_made_of_a_generation() -> None:
    usage = Usage(input_tokens=3, output_tokens=4, total_tokens=7)
    output = GenerationOutput(
        request_id=RequestID("r1"),
        final_status=GenerationStatus.END_OF_SEQUENCE,
        output=[OutputTextContent(text="hi")],
        usage=usage,
    )
    assert output.is_done
    answer = ResponseResource.from_generation_output(output, "m")
    assert (answer.id, answer.object, answer.status, answer.model) == ("resp_r1", "response", "completed", "m")
    (message,) = answer.output
    assert (message.id, message.role, message.status) == ("msg_r1_0", "assistant", "completed")
    assert message.content == output.output
    assert answer.usage == usage


def test_videos_are_equal_by_value() -> None:
    frames = np.random.default_rng().integers(0, 256, (2, 3, 3, 3), np.uint8)
    video = OutputVideoContent.from_numpy_frames(frames)
    assert video == OutputVideoContent.from_numpy_frames(frames.copy())
    assert video != OutputVideoContent.from_numpy_frames(255 - frames)
    assert video != OutputVideoContent.from_numpy_frames(frames, frames_per_second=3)
    assert video != OutputVideoContent(num_frames=2)
    assert OutputVideoContent(video_url="x") == OutputVideoContent(video_url="x")


def test_raw_frames_must_not_leave() -> None:
    video = OutputVideoContent.from_numpy_frames(np.zeros((4, 2, 2, 3), np.uint8), frames_per_second=8)
    assert (video.num_frames, video.frames_per_second) == (4, 8)
    output = GenerationOutput(request_id=RequestID("r"), final_status=GenerationStatus.END_OF_SEQUENCE, output=[video])
    with pytest.raises(ValueError, match=r"output\[0\] holds raw frames"):
        ResponseResource.from_generation_output(output, "m")
