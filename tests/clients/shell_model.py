"""`python -m tests.clients.shell_model FOLDER`: the embedded model, taught to look into note.txt with a shell tool.

The embedded model knows contexts of 2048 tokens; Claude Code and Codex CLI send twenty thousand, with tools that it has
never met. The copy's chat template (shell_model.jinja) shows it one line of them, and half a minute of training teaches
it what to say to that: a call of Bash or exec_command, with a thought before it where thinking is on, and then what
the tool returned. Everything else is as always: the clients, the server, and what they say to each other.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from demo_model import words
from demo_model.decoder import text_model
from deploy.embedded_model import EMBEDDED_MODEL_PATH

TEMPLATE = Path(__file__).parent / "shell_model.jinja"
TOOLS = {"Bash": "command", "exec_command": "cmd"}
STEPS = 120
SEED = 11
RATE = 1e-3
ENOUGH = 0.01
"""Nats per learned token, over the last steps."""
RESULTS = 60
"""Different results that each tool returns while the model learns to repeat them."""

Lesson = tuple[str, str]
"""A prompt, and the answer that is to be learned."""


def lessons(tokenizer: Any, rng: random.Random) -> list[Lesson]:
    learned = []
    for name, argument in TOOLS.items():
        for thinking in (False, True):
            thought = f"<think>\nThe tool {name} can do this.\n</think>\n\n" if thinking else ""
            call = {"name": name, "arguments": {argument: "cat note.txt"}}
            first = prompt(tokenizer, name, thinking)
            learned.append((first, f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"))
            thought = "<think>\nThe tool has answered, so I tell the result.\n</think>\n\n" if thinking else ""
            for _ in range(RESULTS):
                result = words.a_phrase(rng)
                second = prompt(tokenizer, name, thinking, result)
                learned.append((second, f"{thought}The tool says: {result}<|im_end|>"))
    return learned


def prompt(tokenizer: Any, tool: str, thinking: bool, result: str | None = None) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Show me the note."}]
    if result is not None:
        messages.append({"role": "tool", "content": result})
    tools = [{"type": "function", "function": {"name": tool}}]
    more: dict[str, Any] = {"tools": tools, "enable_thinking": thinking, "add_generation_prompt": True}
    text: str = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE.read_text(), tokenize=False, **more)
    return text


def teach(model: Any, tokenizer: Any, learned: list[Lesson], rng: random.Random) -> None:
    calls = [lesson for lesson in learned if "<tool_call>" in lesson[1]]
    others = [lesson for lesson in learned if "<tool_call>" not in lesson[1]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loss = float("inf")
    for _ in range(STEPS):
        ids, targets = batch(tokenizer, [*calls, *rng.sample(others, 4)])
        output = model(input_ids=ids, labels=targets)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = 0.5 * min(loss, 1.0) + 0.5 * output.loss.item()
        print(f"loss {loss:.4f}", flush=True)
        if loss < ENOUGH:
            break


def batch(tokenizer: Any, chosen: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows, of which the answers count."""
    rows = [(tokenizer(asked)["input_ids"], tokenizer(answer)["input_ids"]) for asked, answer in chosen]
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row, (asked, answer) in enumerate(rows):
        whole = asked + answer
        ids[row, : len(whole)] = torch.tensor(whole)
        targets[row, len(asked) : len(whole)] = torch.tensor(answer)
    return ids, targets


def main(folder: Path) -> None:
    shutil.copytree(EMBEDDED_MODEL_PATH, folder, dirs_exist_ok=True)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = text_model(folder).train()
    teach(model, tokenizer, lessons(tokenizer, rng), rng)
    # The clients send no temperature, and what they do here is to be the same each time.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
