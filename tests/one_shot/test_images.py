"""Images over HTTP from real processes: diffusers' own pixels, also when the worker is killed in the middle."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline
from tests.system.server import Server

KIND = "StableDiffusionPipeline"
PATH = "/v1/images/generations"
# An image whose first preview comes long before its end.
LONG: dict[str, Any] = {
    "prompt": "a train in the rain",
    "size": "64x64",
    "num_inference_steps": 150,
    "seed": 70,
    "stream": True,
    "partial_images": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline(KIND, tmp_path_factory.mktemp("images") / "tiny-painter")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A tiny model's passes are shorter than the turns of threads that wait for each other on a busy machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        server = Server(folder, ["--devices", "cpu"], tmp_path_factory.mktemp("log") / "log")
        with server:
            yield server


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(KIND, folder)


def pixels_of(text: str | None) -> NDArray[np.uint8]:
    assert text is not None
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)


def post(server: Server, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(server.url + PATH, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def check(found: NDArray[np.uint8], image: NDArray[np.float32]) -> None:
    # Sums in float32 differ by less than a byte can show, but may be rounded to the next one.
    np.testing.assert_allclose(found.astype(int), np.asarray(image * 255).round(), atol=1)


def running(server: Server) -> float:
    return sum(server.metrics("tokenyard_requests_running").values())


def why(request_id: str | None) -> str:
    assert request_id is not None
    command = [sys.executable, "-m", "deploy.cli", "why", request_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def test_openais_client_gets_diffusers_pixels_from_mixed_batches(server: Server, reference: Reference) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    wanted: list[dict[str, Any]] = [
        {"prompt": "a red train", "steps": 12, "guidance": 7.5, "seed": 5, "width": 32, "height": 32},
        {"prompt": "the bridge", "steps": 5, "guidance": 3.0, "seed": 6, "width": 32, "height": 32},
        {"prompt": "night", "steps": 8, "guidance": 1.0, "seed": 7, "width": 48, "height": 32},
    ]

    def ask(one: dict[str, Any]) -> NDArray[np.uint8]:
        answer = client.images.generate(
            model="tiny-painter",
            prompt=one["prompt"],
            extra_body={
                "size": f"{one['width']}x{one['height']}",
                "num_inference_steps": one["steps"],
                "guidance_scale": one["guidance"],
                "seed": one["seed"],
            },
        )
        assert answer.data is not None
        return pixels_of(answer.data[0].b64_json)

    with ThreadPoolExecutor(len(wanted)) as threads:
        for one, found in zip(wanted, threads.map(ask, wanted), strict=True):
            image = reference.image(
                one["prompt"],
                one["seed"],
                height=one["height"],
                width=one["width"],
                num_inference_steps=one["steps"],
                guidance_scale=one["guidance"],
            )
            check(found, image)


def test_a_stream_shows_how_an_image_becomes(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    wanted: dict[str, Any] = {"model": "tiny-painter", "prompt": "a red train"}
    further = {"num_inference_steps": 9, "seed": 3}
    stream = client.images.generate(**wanted, stream=True, partial_images=2, extra_body=further)
    *previews, last = [(event.type, pixels_of(event.b64_json)) for event in stream]
    assert [kind for kind, _ in previews] == ["image_generation.partial_image"] * 2
    assert last[0] == "image_generation.completed"
    answer = client.images.generate(**wanted, extra_body=further)
    assert answer.data is not None
    np.testing.assert_allclose(last[1].astype(int), pixels_of(answer.data[0].b64_json), atol=1)
    assert [pixels.shape for _, pixels in previews] == [(32, 32, 3)] * 2


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def begin(server: Server) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", PATH, json.dumps(LONG), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_an_image_is_the_same_when_the_worker_is_killed(server: Server, reference: Reference) -> None:
    connection, response = begin(server)
    with closing(connection):
        events = events_of(response)
        first = next(events)
        server.child("model_worker").kill()
        *others, last = events
    # What was shown before is not shown again.
    assert [event["partial_image_index"] for event in (first, *others)] == [0, 1, 2]
    assert last["type"] == "image_generation.completed"
    log = why(response.headers["x-request-id"])
    # It was kept with its first preview at least, and goes on from there.
    kept = re.search(r"image 0 will be computed again, from step (\d+) on", log)
    assert kept is not None, log
    assert int(kept[1]) >= 38
    assert "finished: 1 images" in log
    image = reference.image(LONG["prompt"], 70, height=64, width=64, num_inference_steps=150)
    check(pixels_of(last["b64_json"]), image)


def test_a_client_that_leaves_frees_the_worker(server: Server) -> None:
    server.wait_for("the worker", 60, server.is_ready)
    connection, response = begin(server)
    next(events_of(response))
    connection.close()
    response.close()
    end = "cancelled by its API process; 0 images were answered"
    request_id = response.headers["x-request-id"]
    server.wait_for("the end of the request", 60, lambda: end in why(request_id))
    server.wait_for("an idle worker in the status", 60, lambda: running(server) == 0)
    answer = post(server, {"prompt": "a train", "num_inference_steps": 2})
    assert "step 1 of 2" in why(answer.headers["x-request-id"])


def test_an_edit_of_a_part_is_diffusers_own(server: Server, reference: Reference) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), np.uint8)
    mask = np.zeros((64, 48, 4), np.uint8)
    mask[:, 24:, 3] = 255
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    answer = client.images.edit(
        model="tiny-painter",
        image=file_of(pixels),
        mask=file_of(mask),
        prompt="a red train",
        size="48x64",
        extra_body={"seed": 5, "num_inference_steps": 4, "strength": 0.75},
    )
    assert answer.data is not None
    image = reference.of_task("Inpaint").image(
        "a red train",
        5,
        image=Image.fromarray(pixels),
        mask_image=Image.fromarray(255 - mask[:, :, 3]),
        height=64,
        width=48,
        num_inference_steps=4,
        strength=0.75,
    )
    check(pixels_of(answer.data[0].b64_json), image)


def file_of(pixels: NDArray[np.uint8]) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    file.seek(0)
    return file


def test_a_size_that_is_not_possible_names_the_nearest(server: Server) -> None:
    answer = httpx.post(server.url + PATH, json={"prompt": "a train", "size": "30x33"}, timeout=90)
    assert answer.status_code == 400
    assert "the nearest size is 32x32" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health_generate", timeout=90).status_code == 200
