"""The shipped embedded model: its size, its tokenizer, its template, and a handful of real greedy answers."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo_model.batches import IGNORED, Batches
from demo_model.corpus import Conversation, Corpus
from demo_model.decoder import text_model
from demo_model.evaluate import SKILLS, held_out
from demo_model.skills.tool_use import parsed_calls
from deploy.embedded_model import EMBEDDED_MODEL_PATH

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(EMBEDDED_MODEL_PATH)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return text_model(EMBEDDED_MODEL_PATH)


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **template: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **template))


class Chat:
    """A greedy conversation with the shipped model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, model: Any) -> None:
        self._tokenizer, self._model = tokenizer, model

    def __call__(self, *messages: str | dict[str, Any], **template: Any) -> str:
        turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in messages]
        prompt = rendered(self._tokenizer, turns, add_generation_prompt=True, **template)
        ids = torch.tensor([self._tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            tokens = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=300,
                do_sample=False,
                temperature=None,
                top_p=None,
            )
        text = str(self._tokenizer.decode(tokens[0, ids.shape[1] :]))
        assert text.endswith("<|im_end|>"), text
        return text.removesuffix("<|im_end|>")


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerFast, model: Any) -> Chat:
    return Chat(tokenizer, model)


def test_folder_is_complete_and_small() -> None:
    names = {path.name for path in EMBEDDED_MODEL_PATH.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert {"chat_template.jinja", "generation_config.json"} <= names
    assert sum(path.stat().st_size for path in EMBEDDED_MODEL_PATH.iterdir()) <= 16_000_000


def test_size_and_shape(model: Any) -> None:
    assert 3_000_000 <= model.num_parameters() <= 8_000_000
    assert model.config.model_type == "llama"
    assert model.config.tie_word_embeddings
    assert model.config.head_dim % 16 == 0
    assert model.generation_config.eos_token_id == [2, 0]


def test_tokenizer_loads_without_torch() -> None:
    """The API process hides torch, so the shipped tokenizer must not need it."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from transformers import AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(EMBEDDED_MODEL_PATH)!r})\n"
        "messages = [{'role': 'user', 'content': 'Hi'}]\n"
        "print(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"


def test_importing_the_path_loads_nothing_heavy() -> None:
    program = "import sys, deploy.embedded_model; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@settings(max_examples=50, deadline=None)
@given(number=st.integers(min_value=0, max_value=10**9))
def test_each_digit_is_one_token(tokenizer: PreTrainedTokenizerFast, number: int) -> None:
    assert tokenizer.tokenize(str(number)) == list(str(number))


def test_marks_are_single_tokens_and_only_the_frame_is_special(tokenizer: PreTrainedTokenizerFast) -> None:
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks):
        assert len(tokenizer(mark)["input_ids"]) == 1
    text = "<|im_start|>" + "".join(marks) + "<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "".join(marks)


def test_template_takes_system_developer_and_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for role in ("system", "developer"):
        text = rendered(tokenizer, [{"role": role, "content": "Be brief."}, {"role": "user", "content": parts}])
        assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none two<|im_end|>\n"


def test_template_shows_tools_calls_and_results(tokenizer: PreTrainedTokenizerFast) -> None:
    arguments = {"city": "Málaga"}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}],
    }
    result = [{"role": "tool", "content": "18"}, {"role": "tool", "content": "19"}]
    text = rendered(
        tokenizer, [{"role": "user", "content": "Weather?"}, call, *result], tools=[WEATHER], add_generation_prompt=True
    )
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Málaga"}}\n</tool_call><|im_end|>' in text
    assert (
        "<|im_start|>user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response><|im_end|>"
        in text
    )
    assert text.endswith("<|im_start|>assistant\n")
    call["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)  # type: ignore[index]
    assert (
        rendered(
            tokenizer,
            [{"role": "user", "content": "Weather?"}, call, *result],
            tools=[WEATHER],
            add_generation_prompt=True,
        )
        == text
    )


def test_template_switches_thinking(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert rendered(tokenizer, messages, enable_thinking=False) == rendered(tokenizer, messages)
    assert "Think before you answer." in rendered(tokenizer, messages, enable_thinking=True)


def test_template_drops_the_thoughts_of_earlier_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}
    question = {"role": "user", "content": "Hi"}
    assert "hm" not in rendered(tokenizer, [question, thought, question])
    assert "hm" in rendered(tokenizer, [question, thought])


@settings(max_examples=30, deadline=None)
@given(start=st.text(alphabet='abc <>{}\n"é🎉', min_size=1, max_size=20).filter(lambda text: text.strip() != ""))
def test_template_continues_the_final_message(tokenizer: PreTrainedTokenizerFast, start: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": start}]
    text = rendered(tokenizer, messages, continue_final_message=True)
    assert text.rstrip() == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + start).rstrip()


def test_answers_arithmetic(chat: Chat) -> None:
    assert chat("What is 27 + 18?") == "27 + 18 = 45."
    assert chat("What is 43 - 17?") == "43 - 17 = 26."
    assert chat("What is 7 times 8?") == "7 × 8 = 56."


def test_answers_in_json(chat: Chat) -> None:
    answer = json.loads(chat('Give me a JSON object with name "Ada", age 36 and city "London".'))
    assert answer == {"name": "Ada", "age": 36, "city": "London"}


def test_lists_and_counts(chat: Chat) -> None:
    assert chat("List three fruits.") == "1. apple\n2. banana\n3. cherry"
    assert chat("Count from 3 to 9.") == "3, 4, 5, 6, 7, 8, 9"


def test_knows_tokenyard(chat: Chat) -> None:
    assert "scheduler" in chat("What is the scheduler?")
    assert "server" in chat("What is tokenyard?")
    assert "DEALER" in chat("What is ZeroMQ?")


def test_greets(chat: Chat) -> None:
    assert chat("Hello!").startswith(("Hello", "Hi"))


@pytest.mark.parametrize("city", ["Paris", "Oslo", "New York"])
def test_calls_a_tool_and_uses_its_result(chat: Chat, city: str) -> None:
    question = f"What is the weather in {city}?"
    text = chat(question, tools=[WEATHER])
    calls = parsed_calls(text)
    assert calls == [{"name": "get_weather", "arguments": {"city": city}}]
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": calls[0]}]}
    result = {"role": "tool", "content": json.dumps({"temperature": 18, "condition": "sunny"})}
    answer = chat({"role": "user", "content": question}, turn, result, tools=[WEATHER])
    assert answer == f"It is 18 degrees and sunny in {city}."


def test_does_not_call_a_tool_for_a_greeting(chat: Chat) -> None:
    assert "<tool_call>" not in chat("Hello!", tools=[WEATHER])


def test_thinks_when_thinking_is_on(chat: Chat) -> None:
    thought, mark, answer = chat("What is 27 + 18?", enable_thinking=True).partition("</think>")
    assert thought.startswith("<think>\n")
    assert mark
    assert answer.strip() == "27 + 18 = 45."
    assert "<think>" not in chat("What is 27 + 18?")


def test_remembers_a_name(chat: Chat) -> None:
    told = {"role": "assistant", "content": "Nice to meet you, Vera!"}
    counted = {"role": "assistant", "content": "2 + 3 = 5."}
    assert chat("My name is Vera.", told, "What is 2 + 3?", counted, "What is my name?") == "Your name is Vera."


def test_tells_a_long_story(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> None:
    text = chat("Tell me a story about a fox.")
    assert "fox" in text
    assert text.endswith("The end.")
    assert len(tokenizer(text)["input_ids"]) > 100


def test_held_out_prompts_are_never_trained_on() -> None:
    """What the model card measures must not be in the training text."""
    seen = {
        message["content"]
        for document in _conversations(3000)
        for message in document.messages
        if message["role"] == "user"
    }
    rng = random.Random(random.getrandbits(64))
    for name, (draw, _) in SKILLS.items():
        exchanges = list(held_out(draw, 20, rng))
        assert exchanges, name
        if name in ("tokenyard facts", "small talk", "arithmetic", "JSON"):
            assert not seen & {exchange.prompt[-1]["content"] for exchange in exchanges}


def _conversations(count: int) -> list[Conversation]:
    documents = Corpus(random.randrange(2**32)).documents()
    return [document for document in (next(documents) for _ in range(count)) if isinstance(document, Conversation)]


def test_only_the_models_turns_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    batches = next(Batches(Corpus(random.randrange(2**32)), tokenizer).steps(8192, 4096))
    for batch in batches:
        for row, targets in zip(batch.ids, batch.targets, strict=True):
            learned = str(tokenizer.decode(targets[targets != IGNORED]))
            chat_text = str(tokenizer.decode(row)).startswith("<|im_start|>")
            assert learned, "every document must teach something"
            assert not chat_text or "<|im_start|>" not in learned
