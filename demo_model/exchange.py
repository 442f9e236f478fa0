"""One exchange of the corpus: what the user says, what the model should answer, and how an answer is judged.

Knows the hold-out rule (which exchanges are never trained on). Does not know any skill, nor the chat template.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Check = Callable[[str], bool]

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Exchange:
    """A user's message (and tool results) up to the model's answer; `key` is its identity for the hold-out rule."""

    skill: str
    key: str
    messages: tuple[Message, ...]
    check: Check
    tools: tuple[Message, ...] = ()
    system: str = ""

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(self.key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str, tool_calls: Sequence[Message] = ()) -> Message:
    """The model's turn; `thought` is shown only in conversations with thinking on."""
    message: Message = {"role": "assistant", "content": text, "thought": thought}
    if tool_calls:
        message["tool_calls"] = [{"type": "function", "function": dict(call)} for call in tool_calls]
    return message


def equals(*answers: str) -> Check:
    accepted = frozenset(answer.strip() for answer in answers)
    return lambda text: text.strip() in accepted


def contains(parts: Iterable[str]) -> Check:
    wanted = tuple(parts)
    return lambda text: all(part in text for part in wanted)


def ask(
    skill: str, text: str, answers: str | Sequence[str], thought: str, rng: random.Random, key: str = ""
) -> Exchange:
    """A plain question with one right answer, or a few; without a key the wording itself is held out."""
    accepted = (answers,) if isinstance(answers, str) else tuple(answers)
    reply = assistant(rng.choice(accepted), thought)
    return Exchange(skill, key or text, (user(text), reply), equals(*accepted))


_OPENINGS = ("Please, ", "Hey, ", "Hi, ", "Okay, ", "Now, ", "And ", "So, ", "One question: ")


def reword(text: str, rng: random.Random) -> str:
    """Small changes of form that people make: an opening word, a small first letter, no final mark."""
    if rng.random() < 0.18:
        text = rng.choice(_OPENINGS) + text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2 and text[-1] in ".?!":
        text = text[:-1]
    return text
