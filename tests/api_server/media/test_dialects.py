"""Images in every dialect, on the scheduler double: one picture and text give the same tokens and arrays in all."""

from __future__ import annotations

import base64
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from api_server.text.tokenizer import Tokenizer
from interfaces import CUT_IMAGES, TextAndVisionContext
from interfaces import GENERATE as GENERATE_TASK
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, serving
from tests.api_server.media import models
from tests.api_server.scheduler_double import SchedulerDouble
from tests.api_server.served_app import Web, answer, running

HTTP = httpx.Client(timeout=60)
CHAT, RESPONSES, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"
TOKENS = 4


def png(seed: int = 0, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


def image_part(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), **options}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3, **fields}


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write(tmp_path_factory.mktemp("seeing") / "tiny-llava", "llava")


@pytest.fixture(scope="session")
def seeing_tokenizer(seeing_model: Path) -> Tokenizer:
    return Tokenizer.load(str(seeing_model))


def double_of(run_directory: RunDirectory, tokenizer: Tokenizer) -> SchedulerDouble:
    ids = tokenizer.ids_of("The fox")
    return SchedulerDouble(
        run_directory.api_endpoint,
        lambda _: [*ids, tokenizer.eos_token_ids[0]],
        vocab_size=tokenizer.vocab_size,
        max_model_len=4096,
        tasks=[GENERATE_TASK],
        images=CUT_IMAGES,
    )


Start = Callable[..., LiveServer]


@pytest.fixture
def start(run_directory: RunDirectory, seeing_model: Path, seeing_tokenizer: Tokenizer) -> Iterator[Start]:
    """Starts a server of the tiny LLaVA with some settings."""
    running: list[Any] = []

    def started(model: Path = seeing_model, tokenizer: Tokenizer = seeing_tokenizer, **settings: Any) -> LiveServer:
        double = double_of(run_directory, tokenizer)
        context = serving(double, run_directory, tokenizer, Settings(model=str(model), **settings))
        running.append((context, double))
        return context.__enter__()

    yield started
    for context, double in running:
        context.__exit__(None, None, None)
        double.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, seeing_model: Path) -> Iterator[LiveServer]:
    """One server for all tests that need no settings: its first image waits seconds for the media process."""
    run_directory = RunDirectory(tmp_path_factory.mktemp("run"))
    tokenizer = Tokenizer.load(str(seeing_model))
    double = double_of(run_directory, tokenizer)
    with serving(double, run_directory, tokenizer, Settings(model=str(seeing_model))) as live:
        yield live
    double.close()


def post(live: LiveServer, path: str, body: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body)


def ok(live: LiveServer, path: str, body: Any) -> Any:
    response = post(live, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def context(live: LiveServer) -> TextAndVisionContext:
    found = live.double.submits[-1].context
    assert isinstance(found, TextAndVisionContext)
    return found


def arrays_while_held(live: LiveServer, path: str, body: Any) -> list[bytes]:
    """The pixels of the request's images, read as a worker does while the request runs."""
    live.double.hold.set()
    before = len(live.double.submits)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(post, live, path, body)
        live.double.wait(lambda: len(live.double.submits) > before or response.done(), 60)
        assert not response.done(), response.result().text
        found = [image.pixels.tobytes() for image in context(live).images]
        live.double.hold.clear()
        assert response.result().status_code == 200
    return found


def bodies(data: bytes, text: str) -> dict[str, dict[str, Any]]:
    """One picture and text in each dialect, by path."""
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}}
    return {
        CHAT: chat(image_part(data), text_part(text)),
        RESPONSES: {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": uri(data)},
                        {"type": "input_text", "text": text},
                    ],
                }
            ],
            "max_output_tokens": 3,
        },
        MESSAGES: {
            "messages": [{"role": "user", "content": [anthropic, text_part(text)]}],
            "max_tokens": 3,
        },
    }


def rendered(mark: str, text: str) -> str:
    return f"<|im_start|>user\n{mark}{text}<|im_end|>\n<|im_start|>assistant\n"


def test_all_dialects_give_the_same_tokens_and_arrays(seeing: LiveServer) -> None:
    data = png()
    text = "What is this?"
    prompt = rendered("<image>", text)
    ollama = {"stream": False, "options": {"num_predict": 3}}
    found = bodies(data, text) | {
        GENERATE: {"text": prompt, "image_data": uri(data), "sampling_params": {"max_new_tokens": 3}},
        "/api/chat": {"messages": [{"role": "user", "content": text, "images": [b64(data)]}], **ollama},
        "/api/generate": {"prompt": text, "images": [b64(data)], **ollama},
    }
    seen = []
    for path, body in found.items():
        arrays = arrays_while_held(seeing, path, body)
        seen.append((context(seeing).tokens.prompt.tolist(), arrays, context(seeing).images[0].image_hash))
    tgi = {"inputs": rendered(f"![]({uri(data)})", text), "parameters": {"max_new_tokens": 3}}
    arrays = arrays_while_held(seeing, GENERATE, tgi)
    seen.append((context(seeing).tokens.prompt.tolist(), arrays, context(seeing).images[0].image_hash))
    assert all(each == seen[0] for each in seen)
    tokens = seen[0][0]
    image = context(seeing).images[0]
    token = context(seeing).vision_token_ids[0]
    assert image.end_idx - image.start_idx == TOKENS == tokens.count(token)
    expected = models.reference(Path(seeing.state.settings.model), "llava")(
        images=[Image.open(io.BytesIO(data))], text=[prompt], return_tensors="np"
    )
    assert tokens == expected["input_ids"][0].tolist()
    assert seen[0][1] == [expected["pixel_values"].tobytes()]


def test_usage_counts_the_tokens_of_images(seeing: LiveServer) -> None:
    plain = ok(seeing, CHAT, chat(text_part("What?")))["usage"]["prompt_tokens"]
    data = png()
    assert ok(seeing, CHAT, chat(image_part(data), text_part("What?")))["usage"]["prompt_tokens"] == plain + TOKENS
    counted = ok(seeing, "/v1/messages/count_tokens", {"messages": bodies(data, "What?")[MESSAGES]["messages"]})
    assert counted["input_tokens"] == plain + TOKENS
    tokenized = ok(seeing, "/tokenize", {"messages": chat(image_part(data), text_part("What?"))["messages"]})
    token = seeing.state.tokenizer.token_of("<image>")
    assert tokenized["count"] == plain + TOKENS
    assert tokenized["tokens"].count(token) == TOKENS
    spans = ok(seeing, "/chat_tokenize", chat(image_part(data), text_part("What?")))["tokenize_response"]
    assert [span["id"] for span in spans] == tokenized["tokens"]
    shown = ok(seeing, "/tokenize", {"inputs": f"See ![x]({uri(data)})"})
    assert [span["text"] for span in shown].count("<image>") == TOKENS
    counted = ok(seeing, "/v1/responses/input_tokens", {"input": bodies(data, "What?")[RESPONSES]["input"]})
    assert counted["input_tokens"] == plain + TOKENS


def test_images_in_results_of_tools_are_seen(seeing: LiveServer) -> None:
    data = png()
    source = {"type": "base64", "media_type": "image/png", "data": b64(data)}
    body = {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "screen", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": source | {"data": b64(png(5))}},
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]},
                ],
            },
        ],
        "max_tokens": 3,
    }
    ok(seeing, MESSAGES, body)
    hashes = [image.image_hash for image in context(seeing).images]
    ok(seeing, MESSAGES, bodies(data, "x")[MESSAGES])
    # A tool's result comes before the user's own words, whatever their order in the body.
    assert hashes[0] == context(seeing).images[0].image_hash
    assert len(hashes) == 2
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": uri(data)}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "screen", "arguments": "{}"}
    ok(seeing, RESPONSES, {"input": [call, output], "max_output_tokens": 3})
    assert [image.image_hash for image in context(seeing).images] == hashes[:1]


def test_sglangs_batch_forms(seeing: LiveServer) -> None:
    a, b = png(1), png(2)
    image = "<image>"

    def hashes(text: Any, data: Any) -> list[list[int | None]]:
        before = len(seeing.double.submits)
        ok(seeing, GENERATE, {"text": text, "image_data": data, "sampling_params": {"max_new_tokens": 2}})
        found = [each.context for each in seeing.double.submits[before:]]
        return [[i.image_hash for i in each.images] if isinstance(each, TextAndVisionContext) else [] for each in found]

    (first,) = hashes(image, uri(a))
    (second,) = hashes(image, b64(b))
    assert first != second
    assert hashes(image, [uri(a)]) == [first]
    assert hashes(image, {"url": uri(a), "detail": "auto"}) == [first]
    assert hashes(f"{image} {image}", [uri(a), uri(b)]) == [first + second]
    assert hashes([image, image], uri(a)) == [first, first]
    assert hashes([image, image], [uri(a), uri(b)]) == [first, second]
    assert hashes([image, "x"], [uri(a), None]) == [first, []]
    assert hashes([image * 2, image], [[uri(a), uri(b)], [uri(b)]]) == [first + second, second]
    assert hashes("x", []) == [[]]
    response = post(seeing, GENERATE, {"text": [image, image], "image_data": [uri(a)]})
    assert response.status_code == 400
    assert "length of image_data" in response.text
    answers = ok(seeing, GENERATE, {"text": image, "image_data": uri(a), "sampling_params": {"n": 2}})
    assert len(answers) == 2


def test_token_ids_have_a_placeholder_or_the_whole_run(seeing: LiveServer) -> None:
    tokenizer = seeing.state.tokenizer
    token = tokenizer.token_of("<image>")
    assert token is not None
    words = tokenizer.ids_of("Look")
    expected = [*words, *[token] * TOKENS, *words]
    for ids in ([*words, token, *words], expected):
        ok(seeing, GENERATE, {"input_ids": ids, "image_data": uri(png()), "sampling_params": {"max_new_tokens": 2}})
        assert context(seeing).tokens.prompt.tolist() == expected
        assert (context(seeing).images[0].start_idx, context(seeing).images[0].end_idx) == (len(words), len(words) + 4)
    response = post(seeing, GENERATE, {"input_ids": [token, token], "image_data": uri(png())})
    assert response.status_code == 400
    assert "2 places for images" in response.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, chat(image_part(b"not an image")), ["messages[0].content[0].image_url", "no image"]),
        (CHAT, chat(text_part("a"), image_part(png()[:200])), ["messages[0].content[1].image_url", "cut off"]),
        (CHAT, chat({"type": "image_url", "image_url": "data:image/png,abc"}), ["content[0].image_url", "base64"]),
        (CHAT, chat({"type": "image_url", "image_url": "file:///etc/passwd"}), ["content[0].image_url", "http"]),
        (CHAT, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}), ["valid base64"]),
        (CHAT, chat({"type": "image_url", "image_url": {}}), ["content[0].image_url must be a URL"]),
        (CHAT, chat(image_part(png(), detail="huge")), ["content[0].detail", "low, high"]),
        (CHAT, chat({"type": "image_url", "image_url": "https://example.com/a.png"}), ["--fetch-hosts"]),
        (CHAT, chat(image_part(png()), mm_processor_kwargs={"max_pixels": 0}), ["mm_processor_kwargs.max_pixels"]),
        (CHAT, chat(image_part(png()), mm_processor_kwargs={"fps": 1}), ["mm_processor_kwargs.fps"]),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, ["file_id"]),
        (
            MESSAGES,
            {
                "max_tokens": 3,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}],
            },
            ["messages[0].content[0].source.type", "send base64 or url"],
        ),
        (GENERATE, {"text": "<image>", "image_data": "/etc/passwd"}, ["image_data", "base64"]),
        (GENERATE, {"text": "<image>", "image_data": [3]}, ["image_data[0] must be"]),
        (GENERATE, {"text": "none", "image_data": uri(png())}, ["0 places for images", "1 images"]),
        (GENERATE, {"text": "<image>"}, ["1 places for images", "0 images"]),
        (GENERATE, {"inputs": f"![]({uri(b'x')})"}, ["inputs", "no image"]),
    ],
)
def test_what_cannot_be_seen_is_refused_by_its_path(
    seeing: LiveServer, path: str, body: dict[str, Any], words: list[str]
) -> None:
    response = post(seeing, path, body)
    assert response.status_code in (400, 422), response.text
    for word in words:
        assert word in response.text


def test_the_name_of_the_placeholder_in_a_message_is_text(seeing: LiveServer) -> None:
    ok(seeing, CHAT, chat(text_part("What does <image> mean?")))
    assert not isinstance(seeing.double.submits[-1].context, TextAndVisionContext)
    ok(seeing, CHAT, chat(image_part(png()), text_part("What does <image> mean?")))
    assert len(context(seeing).images) == 1


def test_a_prompt_of_unfinished_images_takes_no_time(seeing: LiveServer) -> None:
    began = time.process_time()
    post(seeing, GENERATE, {"inputs": "![](data:" * 20_000, "parameters": {"max_new_tokens": 1}})
    assert time.process_time() - began < 20  # its square would be a minute, and the server is in this process


def test_images_are_counted(start: Start) -> None:
    live = start(limit_images=2)
    ok(live, CHAT, chat(image_part(png()), image_part(png(1))))
    response = post(live, CHAT, chat(image_part(png()), image_part(png(1)), image_part(png(2))))
    assert response.status_code == 400
    assert "3 images; at most 2" in response.text


def test_a_template_of_texts_gets_the_mark_before_the_text(
    start: Start, tmp_path: Path, seeing_tokenizer: Tokenizer
) -> None:
    path = models.write(tmp_path / "texts", "llava", models.TEXTS)
    live = start(path, Tokenizer.load(str(path)))
    ok(live, CHAT, chat(text_part("What?"), image_part(png()), image_part(png(1))))
    expected = rendered("<image>" * TOKENS + "\n" + "<image>" * TOKENS + "\n", "What?")
    assert context(live).tokens.prompt.tolist() == live.state.tokenizer.ids_of(expected)


def test_the_template_may_be_the_processors(start: Start, tmp_path: Path) -> None:
    path = models.write(tmp_path / "older", "llava", None)
    (path / "chat_template.json").write_text(
        '{"chat_template": "{% for m in messages %}<s>{% for p in m.content %}'
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}\"}"
    )
    live = start(path, Tokenizer.load(str(path)))
    ok(live, CHAT, chat(text_part("A"), image_part(png())))
    assert context(live).tokens.prompt.tolist() == live.state.tokenizer.ids_of("<s>A" + "<image>" * TOKENS)


def test_a_model_without_eyes_refuses_images(seeing: LiveServer) -> None:
    seeing.double.images = 0
    seeing.double.wait(lambda: not seeing.state.sees)
    response = post(seeing, CHAT, chat(image_part(png()), text_part("What?")))
    assert response.status_code == 400
    assert "not supported by this model, only text" in response.text
    response = post(seeing, GENERATE, {"text": "<image>", "image_data": uri(png())})
    assert response.status_code == 400
    assert "image_data" in response.text
    seeing.double.images = CUT_IMAGES
    seeing.double.wait(lambda: seeing.state.sees)


def test_images_come_from_listed_hosts_only(start: Start) -> None:
    data = png(7)
    with running(Web()) as web:
        web.pages["/a.png"] = answer(data, "Content-Type: image/png")
        web.pages["/page"] = answer(b"<html>", "Content-Type: text/html")
        live = start(fetch_hosts="127.0.0.1")
        ok(live, CHAT, chat({"type": "image_url", "image_url": web.url("/a.png")}))
        (fetched,) = [image.image_hash for image in context(live).images]
        ok(live, CHAT, chat(image_part(data)))
        assert context(live).images[0].image_hash == fetched
        source = {"type": "url", "url": web.url("/a.png")}
        content = [{"type": "image", "source": source}]
        ok(live, MESSAGES, {"messages": [{"role": "user", "content": content}], "max_tokens": 3})
        assert context(live).images[0].image_hash == fetched
        response = post(live, CHAT, chat({"type": "image_url", "image_url": web.url("/page")}))
        assert response.status_code == 400
        assert "'text/html', which is no image" in response.text
        response = post(live, CHAT, chat({"type": "image_url", "image_url": "http://localhost/x"}))
        assert "not among the hosts" in response.text


def metric(live: LiveServer, name: str) -> float:
    lines = HTTP.get(f"{live.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def figures(live: LiveServer) -> list[float]:
    """Images, those from the cache, and those that were read."""
    names = ("tokenyard_images_total", "tokenyard_cached_images_total", "tokenyard_image_processing_seconds_count")
    return [metric(live, name) for name in names]


def test_an_image_of_ten_turns_is_read_once(seeing: LiveServer) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": [image_part(png(41)), text_part("What?")]}]
    hashes = set()
    before = figures(seeing)
    for turn in range(10):
        ok(seeing, CHAT, {"messages": turns, "max_tokens": 2})
        hashes.add(context(seeing).images[0].image_hash)
        turns += [{"role": "assistant", "content": "A fox."}, {"role": "user", "content": f"And {turn}?"}]
    assert len(hashes) == 1
    assert [now - then for now, then in zip(figures(seeing), before, strict=True)] == [10, 9, 1]


def test_equal_images_that_arrive_together_are_read_once(seeing: LiveServer) -> None:
    body = chat(image_part(png(42, (400, 300))), text_part("What?"))
    before = figures(seeing)
    with ThreadPoolExecutor(8) as pool:
        assert all(r.status_code == 200 for r in pool.map(lambda _: post(seeing, CHAT, body), range(8)))
    assert figures(seeing)[2] - before[2] == 1


def test_segments_go_with_the_request_and_the_cache(start: Start, tmp_path: Path) -> None:
    path = models.write(tmp_path / "large", "llava")
    settings = path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("28", "224"))
    live = start(path, Tokenizer.load(str(path)), media_cache="1500KiB")
    segments = live.state.engine.segments
    assert segments is not None
    for seed in range(4):
        ok(live, CHAT, chat(image_part(png(seed)), text_part("What?")))
    live.double.wait(lambda: len(segments) == 2)  # each is 602 kB: the cache holds two
    assert context(live).images[0].pixel_values.nbytes == 224 * 224 * 3 * 4


def test_a_killed_process_costs_no_request(seeing: LiveServer) -> None:
    ok(seeing, CHAT, chat(image_part(png()), text_part("What?")))
    client = seeing.state.media.images.client
    first = client.pid
    assert first is not None
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.2):
            if (pid := client.pid) is not None:
                os.kill(pid, signal.SIGKILL)
                return

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(post, seeing, CHAT, chat(image_part(png(i, (900, 900))))) for i in range(100, 110)]
        pool.submit(kill)
        text = [pool.submit(post, seeing, CHAT, chat(text_part("Hello"))) for _ in range(5)]
        assert all(each.result().status_code == 200 for each in text)
        assert {each.result().status_code for each in answers} <= {200, 503}
    ok(seeing, CHAT, chat(image_part(png(999))))
    assert client.pid != first
