"""Images through a whole server, by real clients: the answers are those of transformers' processor and `generate`."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from PIL import Image

from tests.api_server.media import models
from tests.system.server import Server

TOKENS = 8
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FLAGS = ["--dtype", "float32", "--max-batch-tokens", "64", "--max-running", "16", "--kv-memory", "8MB"]
QUESTION = "What is in the image?"


def llava(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama", "vocab_size": size},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        **ids,
    )
    return transformers.LlavaForConditionalGeneration(config)


def internvl(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": size},
        vision_config=TOWER | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]},
        image_seq_length=4,
        downsample_ratio=0.5,
        **ids,
    )
    return transformers.InternVLForConditionalGeneration(config)


def smolvlm(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama", "vocab_size": size},
        vision_config=TOWER | {"model_type": "smolvlm_vision", "image_size": 32, "patch_size": 8},
        scale_factor=2,
        **ids,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def qwen2_vl(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.Qwen2VLConfig(
        text_config=TEXT
        | {
            "vocab_size": size,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **ids,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def gemma3(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.Gemma3Config(
        text_config=TEXT
        | {"vocab_size": size, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=TOWER | {"patch_size": 7},
        mm_tokens_per_image=4,
        **ids,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "vocab_size": size, "head_dim": 16},
        vision_config=TOWER | {"model_type": "pixtral", "image_size": 112},
        spatial_merge_size=2,
        **ids,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def paligemma(size: int, ids: dict[str, Any]) -> Any:
    config = transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma2", "vocab_size": size, "head_dim": 16, "sliding_window": 16},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        projection_dim=64,
        hidden_size=64,
        **ids,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def qwen3_vl(size: int, ids: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": size, "head_dim": 16, "rope_parameters": rope},
        vision_config={"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **ids,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[int, dict[str, Any]], Any]] = {
    "llava": llava,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "qwen2_vl": qwen2_vl,
}
# The family of the server that most tests share.
SHARED = "llava"
# Families whose images stand, are counted or are seen in a way of their own.
OTHERS: dict[str, Callable[[int, dict[str, Any]], Any]] = {
    "gemma3": gemma3,
    "mistral3": mistral3,
    "paligemma": paligemma,
    "qwen3_vl": qwen3_vl,
}


@dataclass
class Seeing:
    """A tiny model with eyes in a directory, and the same in this process."""

    name: str
    path: Path
    model: Any
    processor: Any

    def answer(self, prompt: str, images: list[bytes]) -> list[int]:
        """The tokens that transformers generates."""
        given = self.processor(
            images=[Image.open(io.BytesIO(data)) for data in images] or None, text=[prompt], return_tensors="np"
        )
        inputs = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in given.items()}
        with torch.no_grad():
            found = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        return found[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    def text(self, ids: list[int]) -> str:
        return str(self.processor.tokenizer.decode(ids, skip_special_tokens=True))

    def prompt(self, images: int = 1, question: str = QUESTION) -> str:
        mark = models.FAMILIES[self.name].written
        return f"<|im_start|>user\n{mark * images}{question}<|im_end|>\n<|im_start|>assistant\n"


def made(name: str, path: Path) -> Seeing:
    models.write(path, name)
    tokenizer = models.reference(path, name).tokenizer
    token = tokenizer.convert_tokens_to_ids(models.FAMILIES[name].image_token)
    ids: dict[str, Any] = {"image_token_id": token, "image_token_index": token}
    if name.startswith("qwen"):
        marks = ("video_token", "<|video_pad|>"), ("vision_start_token", "<|vision_start|>")
        ids |= {f"{key}_id": tokenizer.convert_tokens_to_ids(text) for key, text in marks}
        ids["vision_end_token_id"] = tokenizer.convert_tokens_to_ids("<|vision_end|>")
    model = (FAMILIES | OTHERS)[name](len(tokenizer), ids)
    generator = torch.Generator().manual_seed(47)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.5 if "embed" in key else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    (path / "generation_config.json").write_text("{}")
    model.set_attn_implementation("eager")
    return Seeing(name, path, model, models.reference(path, name))


def png(seed: int, size: tuple[int, int] = (64, 48)) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return made(SHARED, tmp_path_factory.mktemp("seeing") / f"tiny-{SHARED}")


@pytest.fixture(scope="module")
def server(seeing: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(seeing.path, FLAGS, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def generate(server: Server, prompt: str | list[int], images: list[bytes], tokens: int = TOKENS) -> dict[str, Any]:
    """SGLang's answer, which has the token ids."""
    key = "text" if isinstance(prompt, str) else "input_ids"
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {key: prompt, "image_data": [uri(data) for data in images], "sampling_params": sampling}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def check_answers(server: Server, tiny: Seeing) -> None:
    """The server's answers about no, one and two images are those of transformers."""
    one, two = png(1, (120, 90)), png(2, (50, 130))
    for images in ([one], [two], [one, two], []):
        prompt = tiny.prompt(len(images))
        assert generate(server, prompt, images)["output_ids"] == tiny.answer(prompt, images), len(images)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    content: Any = [{"type": "image_url", "image_url": {"url": uri(one)}}, {"type": "text", "text": QUESTION}]
    made_by_chat = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": content}], max_tokens=TOKENS, temperature=0
    )
    expected = tiny.answer(tiny.prompt(), [one])
    end = tiny.processor.tokenizer.eos_token_id
    shown = expected[: expected.index(end)] if end in expected else expected
    assert made_by_chat.choices[0].message.content == tiny.text(shown)


def test_answers_are_those_of_transformers(server: Server, seeing: Seeing) -> None:
    check_answers(server, seeing)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != SHARED])
def test_answers_of_other_families_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = made(name, tmp_path / name)
    with Server(tiny.path, FLAGS, tmp_path / "log") as server:
        check_answers(server, tiny)


def test_one_server_of_several_models_with_eyes(tmp_path: Path) -> None:
    first, *others = [made(name, tmp_path / name) for name in OTHERS]
    also = [flag for tiny in others for flag in ("--also", f"{tiny.name}={tiny.path}")]
    one, two = png(1, (120, 90)), png(2, (50, 130))
    with Server(first.path, [*FLAGS, "--served-model-name", first.name, *also], tmp_path / "log") as server:
        for tiny in (first, *others):
            # transformers' processor of PaliGemma takes no text alone.
            for images in ([one], [one, two], [])[: 2 if tiny.name == "paligemma" else 3]:
                parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": uri(data)} for data in images]
                parts.append({"type": "text", "text": QUESTION})
                body = {
                    "model": tiny.name,
                    "messages": [{"role": "user", "content": parts}],
                    "max_tokens": TOKENS,
                    "temperature": 0,
                }
                response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
                assert response.status_code == 200, response.text
                expected = tiny.answer(tiny.prompt(len(images)), images)
                end = tiny.processor.tokenizer.eos_token_id
                shown = expected[: expected.index(end)] if end in expected else expected
                assert response.json()["choices"][0]["message"]["content"] == tiny.text(shown), (tiny.name, len(images))


def test_real_clients_in_each_dialect(server: Server, seeing: Seeing) -> None:
    data = png(3)
    expected = seeing.answer(seeing.prompt(), [data])
    end = seeing.processor.tokenizer.eos_token_id
    shown = seeing.text(expected[: expected.index(end)] if end in expected else expected)
    length = seeing.processor(images=[Image.open(io.BytesIO(data))], text=[seeing.prompt()])["input_ids"]
    openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    parts: Any = [{"type": "input_image", "image_url": uri(data)}, {"type": "input_text", "text": QUESTION}]
    response = openai_client.responses.create(
        model="", input=[{"role": "user", "content": parts}], max_output_tokens=TOKENS, temperature=0
    )
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == (shown, len(length[0]))
    content: Any = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}},
        {"type": "text", "text": QUESTION},
    ]
    message = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages.create(
        model="tiny-llava",
        max_tokens=TOKENS,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len(length[0])
    assert "".join(block.text for block in message.content if block.type == "text") == shown
    hub = InferenceClient(base_url=server.url)
    made_by_tgi = hub.text_generation(
        seeing.prompt().replace("<image>", f"![]({uri(data)})"), max_new_tokens=TOKENS, details=True
    )
    ids = [token.id for token in made_by_tgi.details.tokens] if made_by_tgi.details else []
    assert ids == expected[: len(ids)]
    assert len(ids) > 1


def test_a_batch_of_images_at_once(server: Server, seeing: Seeing) -> None:
    cases = [[png(i), png(i + 50)][: 1 + i % 2] for i in range(10, 16)]
    expected = [seeing.answer(seeing.prompt(len(images)), images) for images in cases]
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda images: generate(server, seeing.prompt(len(images)), images)["output_ids"], cases)
        assert list(found) == expected
    again = generate(server, seeing.prompt(1, "Where?"), [png(10)])
    assert again["output_ids"] == seeing.answer(seeing.prompt(1, "Where?"), [png(10)])


def test_an_image_of_ten_turns_is_read_once_and_encoded_once(server: Server, seeing: Seeing) -> None:
    before = figures(server)
    data = png(400)
    turns: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": uri(data)}, {"type": "text", "text": QUESTION}],
        }
    ]
    for turn in range(10):
        body = {"messages": turns, "max_tokens": 3, "temperature": 0}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        said = response.json()["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn}?"}]
    assert [now - then for now, then in zip(figures(server), before, strict=True)] == [10, 9, 1]


def figures(server: Server) -> list[float]:
    """Images of requests, those from the cache, and those that were read."""
    names = ("tokenyard_images_total", "tokenyard_cached_images_total", "tokenyard_image_processing_seconds_count")
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))) for name in names
    ]


def test_bad_images_are_refused_and_name_their_part(server: Server) -> None:
    for content, words in (
        ([{"type": "image_url", "image_url": uri(png(1)[:300])}], "messages[0].content[0].image_url"),
        ([{"type": "image_url", "image_url": uri(b"GIF89a")}], "messages[0].content[0].image_url"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "file:///etc/passwd"}],
            "content[1].image_url",
        ),
    ):
        response = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}, timeout=60
        )
        assert response.status_code == 400
        assert words in json.dumps(response.json())


def test_killed_processes_change_no_answer(server: Server, seeing: Seeing) -> None:
    """The last test of this server."""
    cases = {seed: seeing.answer(seeing.prompt(), [png(seed)]) for seed in range(200, 206)}
    assert generate(server, seeing.prompt(), [png(200)])["output_ids"] == cases[200]
    with ThreadPoolExecutor(6) as pool:
        # The same seed of draws: a longer answer begins with the shorter one.
        running = {seed: pool.submit(generate, server, seeing.prompt(), [png(seed)], 400) for seed in list(cases)[1:]}
        os.kill(server.child("model_worker").pid, signal.SIGKILL)
        for seed, answer in running.items():
            assert answer.result()["output_ids"][:TOKENS] == cases[seed]
    media = [child for child in server.child("api_server").children() if "media_process" in " ".join(child.cmdline())]
    media[0].kill()
    fresh = png(300)
    assert generate(server, seeing.prompt(), [fresh])["output_ids"] == seeing.answer(seeing.prompt(), [fresh])
