"""POST /v1/images/generations on a scheduler double, with OpenAI's own client; real pixels are in tests/one_shot."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from interfaces import ErrorCode, RequestError
from shared.pixel_adapters import WEIGHTS_FILE, digest
from tests.api_server.conftest import LiveServer, leave_when
from tests.api_server.pixels.conftest import PaintingServer, image_of

PATH = "/v1/images/generations"


def post(server: PaintingServer, **body: Any) -> httpx.Response:
    return httpx.post(server.url + PATH, json={"prompt": "a red train"} | body, timeout=90)


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def pixels_of(text: str, kind: str) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(text)), formats=(kind.upper(),)) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def test_openais_client_gets_images(painting: PaintingServer) -> None:
    client = openai.OpenAI(base_url=f"{painting.url}/v1", api_key="x", max_retries=0)
    answer = client.images.generate(
        model="tiny-painter",
        prompt="a red train",
        n=3,
        size="auto",
        extra_body={"seed": 2**63 - 2, "negative_prompt": "blue", "num_inference_steps": 4, "guidance_scale": 2.5},
    )
    (context,) = painting.double.contexts
    assert context.seeds.tolist() == [2**63 - 2, 2**63 - 1, 0]
    assert (context.prompt, context.negative_prompt) == ("a red train", "blue")
    assert (context.height, context.width, context.steps, context.guidance_scale) == (32, 32, 4, 2.5)
    # Nine letters, a beginning and an end.
    assert context.lengths.tolist() == [11] * 3
    assert answer.data is not None
    assert len(answer.data) == 3
    for image, seed in zip(answer.data, context.seeds.tolist(), strict=True):
        assert image.b64_json is not None
        expected = (image_of(context, seed) * 255).round().reshape(32, 32, 3)
        np.testing.assert_array_equal(pixels_of(image.b64_json, "png"), expected)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (11, 12, 23)
    assert answer.output_format == "png"
    assert answer.size == "32x32"


def test_what_is_not_said_is_the_pipelines(painting: PaintingServer) -> None:
    first, second = (post(painting).json()["data"][0] for _ in range(2))
    assert first["seed"] != second["seed"]
    context = painting.double.contexts[0]
    assert (context.steps, context.guidance_scale, context.negative_prompt) == (50, 7.5, None)
    again = post(painting, seed=first["seed"]).json()["data"][0]
    assert again == first


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_every_format(painting: PaintingServer, kind: str) -> None:
    answer = post(painting, output_format=kind, size="64x48", seed=3).json()
    assert (answer["output_format"], answer["size"]) == (kind, "64x48")
    found = pixels_of(answer["data"][0]["b64_json"], kind).astype(int)
    assert found.shape == (48, 64, 3)
    expected = (image_of(painting.double.contexts[0], 3) * 255).reshape(48, 64, 3)
    assert np.abs(found - expected).mean() < 4
    if kind != "png":
        small = post(painting, output_format=kind, size="64x48", seed=3, output_compression=5).json()
        assert len(small["data"][0]["b64_json"]) < len(answer["data"][0]["b64_json"])


def test_sides_by_themselves(painting: PaintingServer) -> None:
    assert post(painting, width=64).json()["size"] == "64x32"
    assert post(painting, width=64, height=40).json()["size"] == "64x40"


def test_steps_that_the_schedule_does_not_have_are_refused(
    painting: PaintingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = painting.live.state.pooled_model
    assert model is not None
    assert model.pixels is not None
    files = replace(model.pixels, schedule={"original_inference_steps": 40})
    monkeypatch.setattr(painting.live.state, "pooled_model", replace(model, pixels=files))
    refused = error_of(post(painting, num_inference_steps=41))
    assert refused == "num_inference_steps must be at most 40 for this pipeline, got 41"
    for body in ({}, {"num_inference_steps": 40}):
        assert post(painting, **body).status_code == 200
    assert [context.steps for context in painting.double.contexts] == [40, 40]


def test_a_stream_has_previews_and_then_the_image(painting: PaintingServer) -> None:
    client = openai.OpenAI(base_url=f"{painting.url}/v1", api_key="x", max_retries=0)
    events = list(
        client.images.generate(
            model="tiny-painter", prompt="a red train", stream=True, partial_images=3, extra_body={"seed": 9}
        )
    )
    (context,) = painting.double.contexts
    assert context.previews == 3
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [getattr(event, "partial_image_index", None) for event in events] == [0, 1, 2, None]
    for event, seed in zip(events, (1, 2, 3, 9), strict=True):
        expected = (image_of(context, seed) * 255).round().reshape(32, 32, 3)
        np.testing.assert_array_equal(pixels_of(event.b64_json, "png"), expected)
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert (last.usage.total_tokens, last.size, last.output_format) == (15, "32x32", "png")


def test_a_stream_without_previews_has_the_image(painting: PaintingServer) -> None:
    answer = post(painting, stream=True, seed=4)
    assert answer.headers["content-type"].startswith("text/event-stream")
    (event,) = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (event["type"], event["seed"]) == ("image_generation.completed", 4)


def test_an_error_before_the_first_event_of_a_stream_has_its_status(painting: PaintingServer) -> None:
    painting.double.refuse = RequestError(ErrorCode.OVERLOADED, "too much waits")
    answer = post(painting, stream=True, partial_images=1)
    assert error_of(answer, 429) == "too much waits"
    assert int(answer.headers["retry-after"]) > 0


def test_an_error_after_a_preview_is_the_last_event(painting: PaintingServer) -> None:
    painting.double.most = 0
    painting.double.failure = RequestError(ErrorCode.FAILED, "the pixels are not finite")
    answer = post(painting, stream=True, partial_images=1)
    assert answer.status_code == 200
    preview, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert preview["partial_image_index"] == 0
    assert last["error"]["message"] == "the pixels are not finite"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"prompt": "ab " * 40}, "prompt has 82 tokens, and this model reads at most 77"),
        ({"negative_prompt": "ab " * 40}, "negative_prompt has 82 tokens"),
        ({"size": "30x50"}, "size: 30x50 is not possible: both sides must be multiples of 8"),
        ({"size": "30x50"}, "the nearest size is 32x48"),
        ({"size": "9000x9000"}, "the nearest size is 2048x2048"),
        ({"size": "0x64"}, "the nearest size is 8x64"),
        ({"size": "large"}, "size must be auto, or the width and height in pixels such as 32x32, got 'large'"),
        ({"size": "64x64", "width": 64}, "size and width or height say the same twice"),
        ({"width": 33}, "width: 33x32 is not possible"),
        ({"height": 33}, "height: 32x33 is not possible"),
        ({"width": 33, "height": 32}, "width: 33x32 is not possible"),
        ({"width": 32, "height": 33}, "height: 32x33 is not possible"),
        ({"n": 11}, "n: Input should be less than or equal to 10"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"num_inference_steps": 201}, "num_inference_steps: Input should be less than or equal to 200"),
        ({"guidance_scale": -1}, "guidance_scale: Input should be greater than or equal to 0"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"output_format": "gif"}, "output_format: Input should be 'png', 'jpeg' or 'webp'"),
        ({"output_compression": 101}, "output_compression: Input should be less than or equal to 100"),
        ({"response_format": "url"}, "response_format: this server keeps no images"),
        ({"response_format": "file"}, "response_format: Input should be 'b64_json' or 'url'"),
        ({"response_format": "url", "stream": True}, "response_format must be b64_json for a stream"),
        ({"background": "transparent"}, "background: Input should be 'auto' or 'opaque'"),
        ({"quality": "high"}, "quality: Input should be 'auto', 'standard' or 'medium'"),
        ({"stream": True, "n": 2}, "n must be 1 for a stream, got 2"),
        ({"stream": True, "partial_images": 4}, "partial_images: Input should be less than or equal to 3"),
        ({"partial_images": 1}, "partial_images are parts of a stream"),
        ({"lora": "x"}, "lora: there is no adapter 'x'; the server was started without any (--lora)"),
        ({"lora_scale": 1}, "lora_scale is the strength of an adapter"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(painting: PaintingServer, body: dict[str, Any], words: str) -> None:
    assert words in error_of(post(painting, **body))
    assert not painting.double.submits


def test_images_by_url(painting: PaintingServer, tmp_path: Path) -> None:
    painting.live.state.painted_images = tmp_path / "images"
    answer = post(painting, n=2, response_format="url", output_format="webp").json()
    for image in answer["data"]:
        assert "b64_json" not in image
        assert image["url"].startswith(f"{painting.url}/v1/images/")
        file = httpx.get(image["url"], timeout=90)
        assert file.headers["content-type"] == "image/webp"
        assert pixels_of(base64.b64encode(file.content).decode(), "webp").shape == (32, 32, 3)
    assert "there is no such image" in error_of(httpx.get(f"{painting.url}/v1/images/x/content", timeout=90), 404)


def test_images_by_url_that_find_no_room(painting: PaintingServer, tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file is in the folder's place")
    painting.live.state.painted_images = tmp_path / "images"
    assert "cannot keep images now" in error_of(post(painting, response_format="url"), 503)
    assert post(painting, response_format="b64_json").status_code == 200


def test_other_models_and_tasks_are_named(painting: PaintingServer) -> None:
    assert "'nope' does not exist" in error_of(post(painting, model="nope"), 404)
    chat = {"messages": [{"role": "user", "content": "Hello!"}]}
    refused = httpx.post(f"{painting.url}/v1/chat/completions", json=chat, timeout=90)
    assert "paints images (task paint)" in error_of(refused)
    assert PATH in error_of(refused)


def test_a_model_that_generates_text_does_not_paint(live: LiveServer) -> None:
    refused = httpx.post(live.url + PATH, json={"prompt": "a train"}, timeout=90)
    assert "this route needs a model that paints images" in error_of(refused)


def test_the_models_sizes_are_listed(painting: PaintingServer) -> None:
    (model,) = httpx.get(f"{painting.url}/v1/models", timeout=90).json()["data"]
    assert (model["task"], model["default_size"], model["size_multiple"]) == ("paint", "32x32", 8)
    assert (model["default_steps"], model["default_guidance_scale"]) == (50, 7.5)


def test_an_error_has_its_status_also_after_some_images(painting: PaintingServer) -> None:
    painting.double.refuse = RequestError(ErrorCode.OVERLOADED, "too much waits")
    assert error_of(post(painting), 429) == "too much waits"
    painting.double.refuse = None
    painting.double.most = 1
    painting.double.failure = RequestError(ErrorCode.FAILED, "the pixels are not finite")
    assert error_of(post(painting, n=2), 500) == "the pixels are not finite"


@pytest.mark.parametrize("most", [0, 1])
def test_a_client_that_leaves_ends_the_work(painting: PaintingServer, most: int) -> None:
    painting.double.most = most
    leave_when(lambda: painting.double.contexts, painting.live, PATH, {"prompt": "a train", "n": 2})
    painting.double.wait(lambda: painting.double.cancelled == [painting.double.submits[0].handle])
    assert painting.live.state.engine.running == 0


def test_metrics_count_images(painting: PaintingServer) -> None:
    assert post(painting, n=2, size="64x48").status_code == 200
    text = httpx.get(f"{painting.url}/metrics", timeout=90).text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found["tokenyard_painted_images_total"]) == 2
    assert float(found["tokenyard_painted_pixels_total"]) == 2 * 64 * 48
    assert float(found["tokenyard_painting_seconds_count"]) == 1
    assert float(found[f'tokenyard_requests_total{{outcome="ok",route="{PATH}"}}']) == 1


def test_an_adapter_is_named_by_its_content(
    painting: PaintingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(b"weights")
    monkeypatch.setattr(painting.live.state, "settings", replace(painting.live.state.settings, lora=f"ink={tmp_path}"))
    assert post(painting, lora="ink", lora_scale=0.5, step_cache=0.1).status_code == 200
    assert post(painting).status_code == 200
    first, second = painting.double.contexts
    assert (first.lora, first.lora_scale) == (digest(tmp_path / WEIGHTS_FILE), 0.5)
    assert (second.lora, second.lora_scale) == ("", 1.0)
    assert (first.step_cache, second.step_cache) == (0.1, 0.0)
    assert error_of(post(painting, lora="sea")) == "lora: there is no adapter 'sea'; the server has: ink"
    (model,) = httpx.get(f"{painting.url}/v1/models", timeout=90).json()["data"]
    assert model["loras"] == ["ink"]
    assert httpx.get(f"{painting.url}/live", timeout=90).json()["paints"][0]["loras"] == ["ink"]
