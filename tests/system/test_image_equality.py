"""Eight concurrent requests with images, for each family that is served, against transformers' `generate` in float32.

Chunked prefill is forced by a small token budget, and preemption by few blocks. Images come again in other prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interfaces import Finish, SamplingParams, TextAndVisionContext
from model_worker.cpu.simd.cache_dot import GROUP
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from tests.model_worker.vision.tiny_composites import ALL, FUSED, gemma3, llava
from tests.model_worker.vision.tiny_parts import IMAGE, TEXT, Tiny, made
from tests.system.in_process import InProcessServer, Shape, load

TEXT_TOKENS = 5
# Of the logit of a token above that of any other, where rounding in another order cannot change the choice.
LEAST_MARGIN = 0.01
# Tokens that stand for images, videos and what is around them. transformers' forward passes take them for that in an
# answer, too, so none is generated.
PLACEHOLDERS = dict.fromkeys(range(IMAGE, int(TEXT["vocab_size"])), -1e9)
# Texts around the images of a prompt, and which images these are.
CASES: list[tuple[list[list[int]], list[int]]] = [
    ([[3, 4, 5], [7, 8, 9]], [0]),
    ([[40], [11, 12, 13, 14, 15, 16]], [1]),
    ([[3, 4, 5], [17, 18]], [0]),
    ([[20, 21], [22], [23, 24]], [1, 0]),
    ([[3, 4, 5], [7, 8, 9]], [0]),
    ([[30, 31, 32, 33, 34, 35, 36], [37]], [1]),
    ([[41], [42, 43]], [0]),
    ([[44, 45], [46], [47]], [0, 0]),
]


def block_size(make: Callable[[], Tiny]) -> int:
    """Small blocks; those of a stack are as its kernels want them."""
    return GROUP if make in FUSED else 4


def new_tokens(size: int) -> int:
    """Tokens of an answer: they take more than the one block that a row has to spare when another one is admitted."""
    return 2 * size + 4


def sure(tiny: Tiny, texts: list[list[int]], images: list[dict[str, Tensor]], count: int) -> list[int]:
    """What transformers generates without placeholders, up to the first token that rounding may change."""
    tokens, _ = tiny.prompt(texts)
    tiny.model.set_attn_implementation("eager")
    tiny.model.generation_config.eos_token_id = None
    model: Any = tiny.model
    output = model.generate(
        **tiny.inputs(tokens, images),
        max_new_tokens=count,
        do_sample=False,
        suppress_tokens=[*PLACEHOLDERS],
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.scores).topk(2, dim=1)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    found: list[int] = best.indices[:, 0].tolist()
    return found[: next((i for i, margin in enumerate(margins) if margin < LEAST_MARGIN), count)]


def prompts_of(tiny: Tiny) -> list[tuple[list[list[int]], list[int]]]:
    """The cases, as the model takes them: one image in front of the text, where images come first."""
    if not tiny.first:
        return CASES
    return [([[], [1, 7, *texts[0], *texts[-1]]], which[:1]) for texts, which in CASES]


def context_of(
    tiny: Tiny, texts: list[list[int]], which: list[int], images: list[dict[str, Tensor]], count: int
) -> TextAndVisionContext:
    tokens, starts = tiny.prompt(texts)
    return TextAndVisionContext.from_prompt(
        tokens,
        SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, logit_bias=PLACEHOLDERS),
        vision_token_ids=[IMAGE],
        images=[tiny.image(images[i], start, 100 + i) for i, start in zip(which, starts, strict=True)],
    )


def preemptions(
    tiny: Tiny, loaded: LoadedModel, size: int, images: list[dict[str, Tensor]], wanted: list[list[int]], more: int
) -> int:
    """Check the answers with and without overlap, with so many blocks more. Returns how often blocks ran out."""
    found = 0
    prompts = prompts_of(tiny)
    longest = max(len(tiny.prompt(texts)[0]) for texts, _ in prompts) + new_tokens(size)
    for overlap in (True, False):
        blocks = -(-longest // size)
        shape = Shape(
            num_blocks=blocks + blocks // 2 + more,
            block_size=size,
            max_rows=8,
            max_model_len=size * blocks,
            max_batch_tokens=12,
            overlap=overlap,
        )
        server = InProcessServer(loaded, shape)
        for texts, which in prompts:
            server.submit_context(context_of(tiny, texts, which, images, new_tokens(size)))
        answers = server.run()
        assert [answer.error for answer in answers] == [""] * len(prompts)
        assert [len(answer.tokens) for answer in answers] == [new_tokens(size)] * len(prompts)
        pairs = zip(answers, wanted, strict=True)
        assert [answer.tokens[: len(want)] for answer, want in pairs] == wanted, overlap
        assert {answer.finished for answer in answers} == {Finish.LENGTH}
        queue = server.engines[0].encoding
        assert queue is not None
        assert queue.encoded == len(images), "an image that comes again is encoded once"
        found += server.scheduler.counters["preemptions"]
    return found


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_concurrent_answers_are_those_of_transformers(make: Callable[[], Tiny], tmp_path: Path) -> None:
    tiny = made(make)
    tiny.model.save_pretrained(tmp_path)
    images = [tiny.draw() for _ in range(2)]
    size = block_size(make)
    wanted: list[list[int]] = []
    for texts, which in prompts_of(tiny):
        wanted.append(sure(tiny, texts, [images[i] for i in which], new_tokens(size)))
    assert sum(map(len, wanted)) > 40, "most tokens were meant to be sure"
    assert len({tuple(tokens) for tokens in wanted}) > 4, "the reference must vary, or equality would prove little"
    loaded = load(tmp_path)
    assert (loaded.stack is not None) == (make in FUSED)
    # With some numbers of blocks each answer ends just before another one wants its last.
    ran_out = (preemptions(tiny, loaded, size, images, wanted, more) for more in range(5))
    assert any(ran_out), "the blocks were meant to run out"


@pytest.mark.parametrize("make", [llava, gemma3], ids=lambda make: make.__name__)
def test_without_vision_the_text_model_is_served_alone(make: Callable[[], Tiny], tmp_path: Path) -> None:
    tiny = made(make)
    tiny.model.save_pretrained(tmp_path)
    whole, text = (load_model(tmp_path, "float32", "cpu", lambda *_: None, vision=vision) for vision in (True, False))
    assert whole.encoder is not None
    assert text.encoder is None
    prompt = [3, 4, 5, 6, 7]
    model: Any = tiny.model
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    found = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=TEXT_TOKENS, do_sample=False)
    server = InProcessServer(text, Shape(block_size=16))
    server.submit(prompt, SamplingParams(max_new_tokens=TEXT_TOKENS, temperature=0.0))
    server.submit_context(context_of(tiny, [[3], [4]], [0], [tiny.draw()], TEXT_TOKENS))
    answer, refused = server.run()
    assert answer.tokens == found[0, len(prompt) :].tolist()
    assert "takes no images" in refused.error
