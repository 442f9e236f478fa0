"""The formats by name; vLLM and SGLang use the same names."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from api_server.parsers import harmony, json_calls, pythonic, reasoning, sectioned_calls, tagged_arguments
from api_server.parsers.calls import random_id
from api_server.parsers.json_calls import Reader
from api_server.parsers.reasoning import MarkedReasoning, Markers


@dataclass(frozen=True)
class ToolFormat:
    """A family's format of calls. `marks` are texts that may be special tokens and must reach the reader."""

    name: str
    families: str
    read: Reader
    marks: tuple[str, ...]
    new_id: Callable[[], str] = random_id


@dataclass(frozen=True)
class ReasoningFormat:
    """A family's format of reasoning.

    `closing` ends reasoning when its budget is reached. `inside`: answers begin within it, whatever the prompt says.
    """

    name: str
    families: str
    finder: type[MarkedReasoning]
    closing: str
    inside: bool = False

    @property
    def markers(self) -> Markers:
        return self.finder.markers

    @property
    def opening(self) -> str:
        """The text that opens reasoning."""
        mark = self.markers.starts[0]
        return f"{mark}\n" if mark.startswith("<think") else mark

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must reach the reader."""
        return harmony.MARKERS if self.name == "harmony" else self.markers.all

    def reader(self, opened: bool) -> Reader:
        """A reader of reasoning. `opened`: the prompt has opened it."""
        return partial(reasoning.marked, markers=self.markers, inside=opened or self.inside)


def _short_id() -> str:
    """An id of nine characters: Mistral's chat templates accept no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_TOOLS = (
    ToolFormat("hermes", "Hermes, Qwen 2.5, Qwen3, Granite 4, the embedded model", json_calls.hermes, _TOOL_CALL),
    ToolFormat("llama3_json", "Llama 3.1, 3.2, 3.3", json_calls.llama3_json, ("<|python_tag|>",)),
    ToolFormat("pythonic", "Llama 3.2 small, Llama 4", pythonic.pythonic, ("<|python_start|>", "<|python_end|>")),
    ToolFormat("mistral", "Mistral since 2025 (`[ARGS]`)", json_calls.mistral, _MISTRAL, _short_id),
    ToolFormat("mistral_list", "older Mistral (a list)", json_calls.mistral, _MISTRAL, _short_id),
    ToolFormat("deepseek_v3", "DeepSeek V3, R1", sectioned_calls.deepseek, sectioned_calls.DEEPSEEK),
    ToolFormat("deepseek_v31", "DeepSeek V3.1", sectioned_calls.deepseek, sectioned_calls.DEEPSEEK),
    ToolFormat("kimi_k2", "Kimi K2", sectioned_calls.kimi, sectioned_calls.KIMI),
    ToolFormat(
        "glm45",
        "GLM 4.5, 4.6",
        tagged_arguments.glm,
        (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat("qwen3_coder", "Qwen3-Coder", tagged_arguments.qwen_coder, _TOOL_CALL),
    ToolFormat("granite", "Granite 3", json_calls.granite, ("<|tool_call|>", "<function_call>", *_TOOL_CALL)),
    ToolFormat("harmony", "gpt-oss", harmony.harmony, harmony.MARKERS),
    ToolFormat("json", "any model: the whole answer is one call as JSON, or a list of them", json_calls.bare_json, ()),
)
_THOUGHT_ENOUGH = "\n</think>\n\n"
_REASONING = (
    ReasoningFormat(
        "think", "Qwen3, DeepSeek V3.1, GLM 4.5, the embedded model", reasoning.ThinkReasoning, _THOUGHT_ENOUGH
    ),
    ReasoningFormat(
        "deepseek_r1",
        "DeepSeek-R1 and others that always think, whether they say so or not",
        reasoning.ThinkReasoning,
        _THOUGHT_ENOUGH,
        inside=True,
    ),
    ReasoningFormat("mistral", "Magistral", reasoning.MistralReasoning, "[/THINK]"),
    ReasoningFormat("granite", "Granite 3.2, 3.3", reasoning.GraniteReasoning, "\nHere is my response:\n"),
    ReasoningFormat("kimi", "Kimi", reasoning.KimiReasoning, "◁/think▷"),
    ReasoningFormat(
        "harmony",
        "gpt-oss",
        harmony.HarmonyReasoning,
        f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}final{harmony.MESSAGE}",
    ),
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _TOOLS}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {each.name: each for each in _REASONING}

_TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama": "llama3_json",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv3_1": "deepseek_v31",
    "kimik2": "kimi_k2",
    "glm": "glm45",
    "gpt_oss": "harmony",
    "openai": "harmony",
}
_REASONING_ALIASES = {
    "qwen3": "think",
    "qwen3_thinking": "deepseek_r1",
    "deepseek_v3": "think",
    "deepseek_v31": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "magistral": "mistral",
    "gpt_oss": "harmony",
    "openai_gptoss": "harmony",
}


def tool_format(name: str) -> ToolFormat:
    """The tool format of a name. ValueError, with the known names, for an unknown one."""
    found = TOOL_FORMATS.get(_TOOL_ALIASES.get(_plain(name), _plain(name)))
    if found is None:
        raise ValueError(f"tool_parser must be one of {', '.join(TOOL_FORMATS)}, got {name!r:.100}")
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of a name. ValueError, with the known names, for an unknown one."""
    found = REASONING_FORMATS.get(_REASONING_ALIASES.get(_plain(name), _plain(name)))
    if found is None:
        raise ValueError(f"reasoning_parser must be one of {', '.join(REASONING_FORMATS)}, got {name!r:.100}")
    return found


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
