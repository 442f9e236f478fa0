"""What a client wants generated, in one form for all dialects.

A dialect maps its body to a `TextGenerationRequest` and knows nothing of what follows; the code that follows
(`api_server/generation.py`) knows nothing of the dialect. The values here are what was asked: defaults of the model,
tokens and limits are added later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interfaces.sampling import SamplingParamsInput


@dataclass(frozen=True, kw_only=True)
class TextGenerationRequest:
    """One prompt, to be answered `n` times. A batch of prompts is a list of these, given to one `generate` call.

    Exactly one of `prompt` (text or token ids) and `messages` (for the chat template) is given; `ValueError` otherwise.
    """

    request_id: str
    """Name in logs; clients may choose it, so it need not be unique."""

    model_name: str = ""
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    """`role` and `content` (a text or a list of `{"type": "text", "text": ...}`), and `tool_calls` and the like as
    OpenAI has them."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template (`enable_thinking`...)."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer continues the last message instead of opening a new one."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own (BOS...). None: for a text prompt yes, after a chat template no."""

    truncate_prompt_to: int | None = None
    """Keep only the LAST n tokens of the prompt."""

    sampling: SamplingParamsInput = field(default_factory=SamplingParamsInput)
    """`sampling.stop` are the stop strings, `sampling.max_new_tokens` the length that was asked for explicitly."""

    model_defaults: bool = True
    """Whether generation_config.json fills what `sampling` leaves open. Its EOS ids apply in any case."""

    default_max_new_tokens: int | None = None
    """The dialect's length when none was asked for, cut to what fits. None: the model's, else all that fits."""

    clamp_max_new_tokens: bool = False
    """A length asked for that does not fit is cut to what fits, instead of being refused."""

    n: int = 1
    keep_stop: bool = False
    """The answer keeps the stop string or stop token that ended it (special tokens are still skipped)."""

    skip_special_tokens: bool = True
    token_details: bool = False
    """`TextDelta.tokens` is wanted: costs a second detokenization per token."""

    cache_salt: str = ""
    """Requests share cached prompt prefixes only with requests of the same salt."""

    request_path: str = "/"
    received: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when the request's head had arrived."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("exactly one of prompt and messages must be given")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")

    def __str__(self) -> str:
        return self.request_id
