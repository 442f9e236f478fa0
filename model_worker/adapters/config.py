"""What an adapter's config says about the result: scales, and what cannot be computed.

Which modules are adapted is not read from it: the tensors' names say that, and their shapes the ranks. Knows PEFT's
keys. Does not know any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import re2

from model_worker.adapters.files import CONFIG
from model_worker.adapters.refusal import MERGE, AdapterRefused

# Keys that change nothing in the result, or nothing that tensors do not say. `fan_in_fan_out` only says how the base
# weight lies, and `rank_pattern` repeats the shapes.
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("r", "rank_pattern", "fan_in_fan_out", "lora_bias", "qalora_group_size", "runtime_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)
_USED = frozenset(
    (
        *("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "bias", "init_lora_weights"),
        *("modules_to_save", "target_parameters", "trainable_token_indices"),
    )
)
# Why some others cannot be computed.
_REASONS = {
    "layer_replication": "it makes a model of more layers",
    "alora_invocation_tokens": "it begins to act in the middle of a prompt",
}
# Ways to begin training that leave the base model as it is, as PEFT loads them. (PiSSA, OLoRA, CorDA and LoftQ change
# the base.)
_HARMLESS_INITS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "lora_ga", "mica")

# Bounds of the patterns in a config: each is matched with every adapted module's name, which takes time for each of its
# program's instructions and each character.
MOST_PATTERNS = 1024
MOST_PATTERN_BYTES = 512
MOST_INSTRUCTIONS = 1 << 15
# Bytes for one pattern's program.
_PATTERN_MEMORY = 1 << 18


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The values of a config that the result depends on."""

    alpha: float
    alpha_patterns: tuple[tuple[Callable[[str], Any], float], ...]  # the first that matches a module's name counts
    rslora: bool
    dora: bool
    bias: str  # "none", or which modules bring a bias of their own: "lora_only" or "all"
    saved: tuple[str, ...] = ()  # ends of the names of modules that it brings whole
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()  # whose vectors it brings, by the end of the module's name

    def brings(self, module: str) -> bool:
        """Whether the adapter brings a module, or one that it lies in, whole, in place of the base's."""
        parts = module.split(".")
        return any(".".join(parts[:end]).endswith(self.saved) for end in range(1, len(parts) + 1))

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the tokens whose vectors of a module the adapter brings."""
        return next((tokens for name, tokens in self.tokens if f".{module}".endswith(f".{name}" if name else "")), ())

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product."""
        alpha = next((alpha for matches, alpha in self.alpha_patterns if matches(module)), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def parse_config(values: dict[str, Any]) -> AdapterConfig:
    """Check a config. Raises AdapterRefused, by the name of the key, for one that asks for more than is computed."""
    if values.get("peft_type") != "LORA":
        raise AdapterRefused(f"{CONFIG} has peft_type {values.get('peft_type')!r}, and only LORA is supported: {MERGE}")
    for key, value in values.items():
        if key not in _HARMLESS and key not in _USED and value not in (None, False, [], {}):
            reason = _REASONS.get(key, "this key is not supported, and may change the result")
            raise AdapterRefused(f"{CONFIG} has {key} {_shown(value)}: {reason}; {MERGE}")
    init = str(values.get("init_lora_weights")).lower()
    if init not in _HARMLESS_INITS:
        raise AdapterRefused(
            f"{CONFIG} has init_lora_weights {_shown(init)}, which changes the base model: convert the adapter with "
            f"save_pretrained(..., path_initial_model_for_weight_conversion=...), or {MERGE}"
        )
    bias = values.get("bias", "none")
    if bias not in ("none", "lora_only", "all"):
        raise AdapterRefused(f"{CONFIG} has bias {_shown(bias)}: it must be none, lora_only or all")
    return AdapterConfig(
        alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
        alpha_patterns=_alpha_patterns(values.get("alpha_pattern") or {}),
        rslora=_flag("use_rslora", values),
        dora=_flag("use_dora", values),
        bias=bias,
        saved=_names("modules_to_save", values.get("modules_to_save") or []),
        tokens=_tokens(values.get("trainable_token_indices") or []),
    )


def _tokens(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the tokens whose vectors an adapter brings, by the end of their module's name; empty: of the embedding."""
    by_module = value if isinstance(value, dict) else {"": value} if value else {}
    for tokens in by_module.values():
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise AdapterRefused(f"{CONFIG}: trainable_token_indices must be lists of token ids, got {_shown(value)}")
    return tuple((str(name), tuple(tokens)) for name, tokens in by_module.items())


def _alpha_patterns(patterns: Any) -> tuple[tuple[Callable[[str], Any], float], ...]:
    """Compile the patterns of a config, in its order."""
    if not isinstance(patterns, dict) or len(patterns) > MOST_PATTERNS:
        raise AdapterRefused(f"{CONFIG}: alpha_pattern must be an object of at most {MOST_PATTERNS} entries")
    programs = [_program(pattern) for pattern in patterns]
    size = sum(program.programsize for program in programs)
    if size > MOST_INSTRUCTIONS:
        raise AdapterRefused(
            f"{CONFIG}: alpha_pattern is too complex, with {size} instructions where {MOST_INSTRUCTIONS} are possible: "
            "name modules instead"
        )
    alphas = [_number("alpha_pattern", alpha) for alpha in patterns.values()]
    return tuple((program.match, alpha) for program, alpha in zip(programs, alphas, strict=True))


def _program(pattern: str) -> Any:
    """Compile a pattern for a module's name, or for its end from a dot on.

    RE2 takes time linear in the name, whatever the pattern, and knows no lookaround and no references.
    """
    if len(pattern.encode(errors="replace")) > MOST_PATTERN_BYTES:
        raise AdapterRefused(
            f"{CONFIG}: alpha_pattern {_shown(pattern)} is longer than {MOST_PATTERN_BYTES} bytes: name modules instead"
        )
    options: Any = re2.Options()
    options.log_errors = False
    options.max_mem = _PATTERN_MEMORY
    try:
        return re2.compile(rf"(.*\.)?({pattern})$", options)
    except (re2.error, ValueError) as error:
        raise AdapterRefused(
            f"{CONFIG}: alpha_pattern {_shown(pattern)} cannot be matched safely ({error}): name modules instead"
        ) from None


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterRefused(f"{CONFIG}: {key} must be a number, got {_shown(value)}")
    return float(value)


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise AdapterRefused(f"{CONFIG}: {key} must be a list of names, got {_shown(value)}")
    return tuple(value)


def _flag(key: str, values: dict[str, Any]) -> bool:
    value = values.get(key) or False
    if not isinstance(value, bool):
        raise AdapterRefused(f"{CONFIG}: {key} must be true or false, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """Show a value of a stranger's file, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
