"""The special tokens of a GGUF file: which begin a text, which end one, which pad."""

from __future__ import annotations

from collections.abc import Sequence

from shared.gguf.file import GgufFile

# Kinds of tokens, as tokenizer.ggml.token_type numbers them.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

# Control tokens that end an answer wherever they are, beside those that the file names by their ids.
_ENDING = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    ]
)
# Those of gpt-oss, in whose answers <|end|> ends one message of several.
_HARMONY = frozenset(["<|return|>", "<|call|>"])
_HARMONY_MESSAGE = "<|end|>"


def token_id(file: GgufFile, name: str) -> int | None:
    """Return the id of a special token, such as "bos" or "padding"; None where the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    stated = file.metadata.get(key)
    # Converters write the largest number for none.
    if stated is None or stated in (-1, (1 << 32) - 1):
        return None
    return file.integer(key, most=len(tokens_of(file)) - 1)


def tokens_of(file: GgufFile) -> list[str]:
    """Return the texts of all tokens."""
    if not file.tokens:
        raise file.wrong("tokenizer.ggml.tokens", "an array of at least one text")
    return file.tokens


def kinds_of(file: GgufFile) -> Sequence[int]:
    """Return the kind of each token."""
    kinds = file.numbers("tokenizer.ggml.token_type", "iu")
    count = len(tokens_of(file))
    if kinds is None:
        return [NORMAL] * count
    if len(kinds) != count:
        raise file.wrong("tokenizer.ggml.token_type", f"an array of {count} numbers, one for each token")
    found: list[int] = kinds.tolist()
    return found


def end_tokens(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer, the main one first."""
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    kinds = kinds_of(file)
    ending = _ENDING
    if _HARMONY.issubset(tokens_of(file)):
        ending = (_ENDING | _HARMONY) - {_HARMONY_MESSAGE}
        named = [token for token in named if token is None or tokens_of(file)[token] != _HARMONY_MESSAGE]
    known = [i for i, text in enumerate(tokens_of(file)) if text in ending and kinds[i] in (CONTROL, USER_DEFINED)]
    return list(dict.fromkeys(token for token in [*named, *known] if token is not None))
