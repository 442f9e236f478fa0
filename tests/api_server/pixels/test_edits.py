"""POST /v1/images/edits and /variations on a scheduler double, with OpenAI's own client and hostile files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from interfaces import mapped
from tests.api_server.conftest import LiveServer
from tests.api_server.media.test_decode import png_of_header, saved
from tests.api_server.pixels.conftest import PaintingServer
from tests.api_server.pixels.test_route import error_of

EDITS = "/v1/images/edits"
VARIATIONS = "/v1/images/variations"


def picture(width: int = 32, height: int = 32, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(width).integers(0, 256, (height, width, channels), np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    return saved(Image.fromarray(pixels))


def send(
    server: PaintingServer, files: dict[str, bytes], path: str = EDITS, texts: dict[str, str] | None = None
) -> httpx.Response:
    fields = {"prompt": "a red train"} | (texts or {})
    if path == VARIATIONS and texts is None:
        fields = {}
    parts = {name: (f"{name}.png", data, "image/png") for name, data in files.items()}
    return httpx.post(server.url + path, data=fields, files=parts, timeout=90)


@pytest.fixture
def originals(painting: PaintingServer, monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.uint8] | None]:
    """The images that contexts begin with: read as they are submitted, since their segments go with the request."""
    found: list[NDArray[np.uint8] | None] = []
    engine = painting.live.state.engine
    submit = engine.stream

    def stream(context: Any, *rest: Any) -> Any:
        found.extend([context.original, context.mask])
        return submit(context, *rest)

    monkeypatch.setattr(engine, "stream", stream)
    return found


def test_openais_client_edits_a_part(painting: PaintingServer, originals: list[NDArray[np.uint8] | None]) -> None:
    given = picture(48, 32)
    mask = np.zeros((32, 48, 4), np.uint8)
    mask[:, :12, 3] = 255
    client = openai.OpenAI(base_url=f"{painting.url}/v1", api_key="x", max_retries=0)
    answer = client.images.edit(
        model="tiny-painter",
        image=[io.BytesIO(png(given))],
        mask=io.BytesIO(png(mask)),
        prompt="7",
        n=2,
        size="48x32",
        extra_body={"seed": 9, "num_inference_steps": 4, "strength": 0.5, "negative_prompt": "true"},
    )
    (context,) = painting.double.contexts
    assert (context.prompt, context.negative_prompt, context.strength) == ("7", "true", 0.5)
    assert (context.seeds.tolist(), context.steps, context.steps_taken) == ([9, 10], 4, 2)
    pixels, found = originals
    np.testing.assert_array_equal(pixels, given.reshape(32, -1))
    # What is transparent is painted anew.
    np.testing.assert_array_equal(found, np.where(np.arange(48) < 12, 0, 255)[None].repeat(32, 0))
    assert answer.data is not None
    assert [image.model_dump()["seed"] for image in answer.data] == [9, 10]
    assert answer.usage is not None
    # A digit, a beginning and an end; three by two patches.
    assert (answer.usage.input_tokens_details.image_tokens, answer.usage.input_tokens) == (6, 9)


def test_a_mask_without_transparency_is_white_where_it_counts(
    painting: PaintingServer, originals: list[NDArray[np.uint8] | None]
) -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[:10] = 200
    assert send(painting, {"image": png(picture()), "mask": png(mask)}).status_code == 200
    (context,) = painting.double.contexts
    # diffusers' own default where a part stays.
    assert context.strength == 1.0
    np.testing.assert_array_equal(originals[1], np.where(np.arange(32) < 10, 255, 0)[:, None].repeat(32, 1))


@pytest.mark.parametrize(("width", "height", "size"), [(32, 24, "32x24"), (640, 320, "48x24"), (17, 9, "16x8")])
def test_without_a_size_an_image_keeps_its_own_up_to_the_models(
    painting: PaintingServer, originals: list[NDArray[np.uint8] | None], width: int, height: int, size: str
) -> None:
    given = picture(width, height)
    answer = send(painting, {"image": png(given)})
    assert answer.json()["size"] == size
    wide, high = (int(side) for side in size.split("x"))
    resized = np.asarray(Image.fromarray(given).resize((wide, high), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(originals[0], resized.reshape(high, -1))
    (context,) = painting.double.contexts
    assert (context.mask, context.strength) == (None, 0.8)


def test_openais_client_gets_variations(painting: PaintingServer) -> None:
    client = openai.OpenAI(base_url=f"{painting.url}/v1", api_key="x", max_retries=0)
    answer = client.images.create_variation(image=io.BytesIO(png(picture())), n=3)
    assert answer.data is not None
    assert len(answer.data) == 3
    (context,) = painting.double.contexts
    assert (context.prompt, context.strength, context.mask) == ("", 0.8, None)
    assert mapped(context.original).shape == (32, 96)  # type: ignore[arg-type]


def test_an_edit_streams_its_previews(painting: PaintingServer) -> None:
    answer = send(painting, {"image": png(picture())}, texts={"stream": "true", "partial_images": "2", "seed": "3"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert events[-1]["seed"] == 3


HOSTILE = [
    ({"image": b"no image"}, "image: the image is no image that can be read here"),
    ({"image": png(picture())[:-40]}, "image: the image is damaged or cut off"),
    ({"image": png_of_header(9000, 9000)}, "image: the image has 9000 x 9000 pixels"),
    ({"image": png(picture()), "mask": b"\x89PNG"}, "mask: the image is"),
    ({"image": png(picture()), "mask": png(picture())[:-40]}, "mask: the image is damaged or cut off"),
    ({"image": png(picture()), "mask": png(picture(48, 32))}, "mask: the image has 48 x 32 pixels, and the image 32"),
    ({"image": png(picture()), "mask": b""}, "mask has no bytes"),
    ({"image": png(picture()), "photo": b"1"}, "photo is no file of this form"),
    ({"mask": png(picture())}, "image must be given, as a file of the form"),
    ({"image": b""}, "image must be given, as a file of the form"),
]


def test_files_that_cannot_be_used_are_refused_by_their_part(painting: PaintingServer) -> None:
    for files, words in HOSTILE:
        assert words in error_of(send(painting, files))
    assert not painting.double.submits
    assert send(painting, {"image": png(picture())}).status_code == 200


def test_texts_that_cannot_be_used_are_refused_by_their_field(painting: PaintingServer) -> None:
    image = {"image": png(picture())}
    wrong = [
        ({"strength": "0"}, "strength: Input should be greater than 0"),
        ({"strength": "1.5"}, "strength: Input should be less than or equal to 1"),
        ({"strength": "much"}, "strength: Input should be a valid number"),
        ({"strength": "0.1", "num_inference_steps": "4"}, "strength: 0.1 of 4 steps leaves none: send at least 0.25"),
        ({"width": "32"}, "height: the other side alone would stretch the image: send both, or neither"),
        ({"size": "30x32"}, "the nearest size is 32x32"),
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"n": "11"}, "n: Input should be less than or equal to 10"),
        ({"model": "nope"}, "'nope' does not exist"),
        ({"lora": "x"}, "lora: there is no adapter 'x'"),
    ]
    for texts, words in wrong:
        answer = send(painting, image, texts=texts)
        assert words in error_of(answer, 404 if "model" in texts else 400)
    assert "stream is not possible" in error_of(send(painting, image, VARIATIONS, {"stream": "true"}))
    refused = httpx.post(painting.url + VARIATIONS, json={"prompt": "a train"}, timeout=90)
    assert "must be multipart/form-data" in error_of(refused, 415)
    refused = httpx.post(painting.url + EDITS, content=b"a train", headers={"content-type": "text/plain"}, timeout=90)
    assert "must be multipart/form-data" in error_of(refused, 415)


def reference(data: bytes) -> dict[str, str]:
    return {"image_url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


def test_an_edit_may_be_json(painting: PaintingServer, originals: list[NDArray[np.uint8] | None]) -> None:
    given = picture(48, 32)
    mask = np.zeros((32, 48), np.uint8)
    mask[:, :12] = 255
    body = {"prompt": "7", "images": [reference(png(given))], "mask": reference(png(mask)), "strength": 0.5, "seed": 3}
    more = {"num_inference_steps": 4, "n": 2, "size": "48x32", "model": "tiny-painter", "input_fidelity": "low"}
    answer = httpx.post(painting.url + EDITS, json=body | more, timeout=90)
    assert [image["seed"] for image in answer.json()["data"]] == [3, 4]
    np.testing.assert_array_equal(originals[0], given.reshape(32, -1))
    np.testing.assert_array_equal(originals[1], mask)
    (context,) = painting.double.contexts
    assert (context.prompt, context.strength, context.steps_taken) == ("7", 0.5, 2)
    # The form of the same edit makes the same context.
    assert send(painting, {"image": png(given)}, texts={"strength": "0.5", "size": "48x32"}).status_code == 200
    np.testing.assert_array_equal(originals[2], originals[0])
    streamed = httpx.post(painting.url + EDITS, json=body | {"stream": True, "partial_images": 1}, timeout=90)
    assert streamed.text.count("event: image_edit.") == 2


def test_json_that_cannot_be_used_is_refused_by_its_field(painting: PaintingServer) -> None:
    good = reference(png(picture()))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "images: missing field"),
        ({"images": []}, "images: List should have at least 1 item"),
        ({"images": good}, "images: Input should be a valid list"),
        ({"images": [good, good]}, "images has 2 images, and the pipelines of this server take one: leave the others"),
        ({"images": [good] * 17}, "images: 17 entries were given; at most 16 are possible"),
        ({"images": [{"file_id": "file-1"}]}, "images[0].file_id: the name of a file (send the image itself as image_"),
        ({"images": [{}]}, "images[0].image_url: missing field"),
        ({"images": [{"image_url": "train.png"}]}, "images[0].image_url must be an http or https URL or a data URI"),
        ({"images": [{"image_url": "https://a/b.png"}]}, "images[0].image_url: this server fetches no URLs"),
        ({"images": [{"image_url": "data:image/png;base64,%"}]}, "images[0].image_url is not valid base64"),
        ({"images": [reference(b"")]}, "images[0].image_url has no bytes"),
        ({"images": [reference(b"no image")]}, "images[0].image_url: the image is no image that can be read here"),
        ({"images": [good], "mask": reference(png(picture(48, 32)))}, "mask.image_url: the image has 48 x 32 pixels"),
        ({"images": [good], "mask": {"file_id": "file-1"}}, "mask.file_id: the name of a file"),
        ({"image": "data:", "images": [good]}, "image: this name (send images, a list with one"),
        ({"images": [good], "prompt": ""}, "prompt: String should have at least 1 character"),
    ]
    for more, words in wrong:
        refused = httpx.post(painting.url + EDITS, json={"prompt": "a train"} | more, timeout=90)
        assert words in error_of(refused)
    assert not painting.double.submits
    assert httpx.post(painting.url + EDITS, json={"prompt": "a", "images": [good]}, timeout=90).status_code == 200


def test_an_edited_image_may_have_a_url(painting: PaintingServer, tmp_path: Path) -> None:
    painting.live.state.painted_images = tmp_path / "images"
    answer = send(painting, {"image": png(picture())}, VARIATIONS, {"response_format": "url"})
    assert httpx.get(answer.json()["data"][0]["url"], timeout=90).headers["content-type"] == "image/png"


def test_a_model_that_generates_text_edits_no_images(live: LiveServer) -> None:
    parts = {"image": ("a.png", png(picture()), "image/png")}
    refused = httpx.post(live.url + EDITS, data={"prompt": "a train"}, files=parts, timeout=90)
    assert "this route needs a model that paints images" in error_of(refused)
