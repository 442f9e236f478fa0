"""Loads a model's tokenizer, from whichever files its repository has, without ever running code of the repository.

Every process that needs tokens loads them here, so that all read the same. transformers is imported when it is needed,
so that a process can hide torch first (hidden_torch.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from shared.character_tokenizer import character_tokenizer
from shared.gguf.format import is_gguf
from shared.json_files import read_json_file
from shared.load_errors import broken_file
from shared.tekken import add_control_tokens

_TOKENIZER = "tokenizer.json"
_TEKKEN = "tekken.json"
# Files of other libraries that transformers converts: the package that each needs, and the file's own library.
_OTHER_FILES = {
    "tokenizer.model": ("sentencepiece", "sentencepiece"),
    "spiece.model": ("sentencepiece", "sentencepiece"),
    "sentencepiece.bpe.model": ("sentencepiece", "sentencepiece"),
    "tiktoken.model": ("tiktoken", "tiktoken"),
    "qwen.tiktoken": ("tiktoken", "tiktoken"),
}
_EXTRA = "pip install 'tokenyard[tokenizers]'"


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a directory or hub name, or of a GGUF file, on the tokenizers library. ValueError says what
    is missing."""
    if is_gguf(model):
        from shared.gguf.fast_tokenizer import gguf_tokenizer

        return gguf_tokenizer(model)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Of a tokenizer with code of its own transformers would ask on the terminal whether to run it. The class that reads
    # tokenizer.json alone does not need it; nor a config of the model that has errors, which the worker will name.
    kinds: list[Any] = [PreTrainedTokenizerFast] if _has_code(model) else [AutoTokenizer, PreTrainedTokenizerFast]
    tokenizer: Any = None
    first: Exception | None = None
    for kind in kinds:
        try:
            # A package of Mistral's would take the place of the tokenizers library where it is installed.
            tokenizer = kind.from_pretrained(model, trust_remote_code=False, mistral_format=False)
            break
        except Exception as error:  # the tokenizers library raises nothing narrower
            first = first or error
    if type(tokenizer).__name__ == "VitsTokenizer":
        # Texts to speak are read by speech_files.py; this one serves the routes about tokens.
        return character_tokenizer(tokenizer.get_vocab())
    if tokenizer is None:
        assert first is not None
        raise ValueError(f"the tokenizer of {model} cannot be loaded: {_reason(model, first)}") from first
    if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer of {model} has no {_TOKENIZER} form, which this server needs: "
            f"{_missing(model) or 'add that file'}"
        )
    tekken = file_of(model, _TEKKEN)
    if tekken is not None and file_of(model, _TOKENIZER) is None:
        add_control_tokens(tokenizer, tekken)
    return tokenizer


def _has_code(model: str) -> bool:
    """Whether the tokenizer's files name code of their own."""
    found = read_json(model, "tokenizer_config.json")
    mapped = found.get("auto_map")
    return bool(mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped)


def _reason(model: str, error: Exception) -> str:
    """Say why a tokenizer cannot be loaded, in one sentence."""
    said = (str(error).strip() or repr(error)).splitlines()[0]
    if broken := broken_file(model):
        return broken
    if "trust_remote_code" in str(error) or _has_code(model):
        return (
            f"tokenizer_config.json names code of its own (auto_map), which is never run, and there is no usable "
            f"{_TOKENIZER} beside it ({said}): add that file"
        )
    return _missing(model) or said


def _missing(model: str) -> str:
    """Say which file or package a tokenizer lacks; empty if neither explains it."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or (folder / _TOKENIZER).is_file():
        return ""
    for name, (package, library) in _OTHER_FILES.items():
        if (folder / name).is_file():
            if importlib.util.find_spec(package) is None:
                return f"{name} is {library}'s, and that package is not installed: {_EXTRA}, or add {_TOKENIZER}"
            return f"{name} cannot be converted by {library}: add {_TOKENIZER}"
    if any((folder / name).is_file() for name in ("vocab.json", "vocab.txt", "merges.txt")):
        return ""
    return f"there is no tokenizer in the folder (neither {_TOKENIZER} nor {', '.join((*_OTHER_FILES, _TEKKEN))})"


def read_json(model: str, name: str) -> dict[str, Any]:
    """Read an optional JSON object of a model's repository; empty where it is absent or no object."""
    path = file_of(model, name)
    if path is None:
        return {}
    try:
        found = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def file_of(model: str, name: str) -> Path | None:
    """Find a file of a directory, or of a hub name; None where there is none, as beside a GGUF file."""
    if is_gguf(model):
        return None
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None
