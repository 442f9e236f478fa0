"""Builds the tokenizer that a GGUF file describes: byte pairs, or sentencepiece's vocabulary with scores.

The tokenizers library computes; a GGUF file has no tokenizer.json, so its normalizer, splits, merges, added tokens and
decoder are made here. Knows no chat template's language.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shared.gguf.file import GgufFile
from shared.gguf.format import GgufError, damaged
from shared.gguf.special_tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    end_tokens,
    kinds_of,
    token_id,
    tokens_of,
)
from shared.gguf.splits import SPLITS, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "▁"
_TEMPLATE = "tokenizer.chat_template"
# Names of a file's special tokens, and the attributes of transformers' tokenizers.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Tokens of Phi 3 after which it was trained without the white space that follows.
_STRIPS_BEHIND = "phi3"
_KEEPS_SPACE_BEHIND = frozenset(["<unk>", "<s>", "<|endoftext|>"])


class GgufTokenizer(NamedTuple):
    """A tokenizer, and the facts about it that tokenizer_config.json has in other checkpoints."""

    backend: Tokenizer
    special_tokens: dict[str, str]  # by the attributes of transformers' tokenizers
    end_tokens: list[int]
    chat_template: str | dict[str, str] | None


def tokenizer_of(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer. GgufError names what is wrong with the file, or not supported."""
    tokens = tokens_of(file)
    backend = _make(file)
    _add_special_tokens(file, backend)
    _add_ends(file, backend)
    ids = {attribute: token_id(file, name) for name, attribute in _SPECIAL.items()}
    special = {attribute: tokens[token] for attribute, token in ids.items() if token is not None}
    return GgufTokenizer(backend, special, end_tokens(file), _chat_template(file))


def check_tokenizer(file: GgufFile) -> None:
    """Check the kind of tokenizer without building it. GgufError for one that is not supported."""
    model = file.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise GgufError(
            f"{file.path}: tokenizer.ggml.model is {model!r}, and gpt2 (byte pairs) and llama (sentencepiece) are "
            "supported; use the model's Hugging Face directory"
        )
    if model == "gpt2":
        _split(file)
    end_tokens(file)


def _make(file: GgufFile) -> Tokenizer:
    check_tokenizer(file)
    try:
        return _byte_pairs(file) if file.text("tokenizer.ggml.model") == "gpt2" else _sentencepiece(file)
    except GgufError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise damaged(file.path, f"tokenizer.ggml.tokens and merges make no tokenizer: {error}") from error


def _byte_pairs(file: GgufFile) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split(file)
    merges = []
    for number, merge in enumerate(file.texts("tokenizer.ggml.merges")):
        # A space at the beginning is a part of the first token.
        cut = merge.find(" ", 1)
        if cut < 0 or cut + 1 == len(merge):
            raise damaged(file.path, f"entry {number} of tokenizer.ggml.merges is {merge!r}, not two tokens")
        merges.append((merge[:cut], merge[cut + 1 :]))
    backend = Tokenizer(
        models.BPE(vocab=_vocabulary(file, tokens_of(file)), merges=merges, ignore_merges=split.ignores_merges)
    )
    if split.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(file: GgufFile) -> Split:
    key = "tokenizer.ggml.pre"
    name = file.text(key, "qwen2" if file.architecture.startswith("qwen") else None)
    if name not in SPLITS:
        raise GgufError(
            f"{file.path}: {key} is {name!r}, which is not supported; use one of {', '.join(SPLITS)}, "
            "or the model's Hugging Face directory"
        )
    return SPLITS[name]


def _sentencepiece(file: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = file.architecture.startswith("gemma")
    tokens = [_respelled(token) for token in tokens_of(file)] if gemma else tokens_of(file)
    vocabulary = _vocabulary(file, tokens)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", not gemma)
    unknown = token_id(file, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(file, tokens, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _respelled(token: str) -> str:
    """Return a run of spaces as the vocabulary of Gemma has it."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    """Return the ids of all tokens; rows of the embedding that stand for none are left out, if they are the last."""
    kinds = kinds_of(file)
    count = len(tokens)
    while count > 1 and kinds[count - 1] == UNUSED and tokens[count - 1].startswith("[PAD"):
        count -= 1
    vocabulary: dict[str, int] = {}
    for token in range(count):
        vocabulary.setdefault(tokens[token], token)
    return vocabulary


def _merges_by_score(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that make each token, those of the best tokens first.

    A score is the order in which sentencepiece has found its tokens. Those of Gemma are in the order of their ids.
    """
    count = len(tokens)
    scores = file.numbers("tokenizer.ggml.scores", "f")
    if scores is None or len(scores) != count:
        raise file.wrong("tokenizer.ggml.scores", f"an array of {count} numbers, one for each token")
    kinds = kinds_of(file)
    by_id = file.architecture.startswith("gemma")
    plain = {token for i, token in enumerate(tokens) if kinds[i] == NORMAL or not token.strip(_SPACE)}
    found = []
    for token in plain:
        place = vocabulary.get(token)
        if place is None:
            continue
        score = -float(place) if by_id else float(scores[place])
        for cut in range(1, len(token)):
            if token[:cut] in plain and token[cut:] in plain:
                left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-score, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda pair: pair[:3])
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(file: GgufFile, backend: Any) -> None:
    from tokenizers import AddedToken

    vocabulary = backend.get_vocab(with_added_tokens=False)
    strips = file.architecture == _STRIPS_BEHIND and file.text("tokenizer.ggml.model") == "llama"
    special = []
    plain = []
    for token, kind in zip(tokens_of(file), kinds_of(file), strict=True):
        if not token or token not in vocabulary:
            continue
        if kind in (CONTROL, UNKNOWN):
            behind = strips and token not in _KEEPS_SPACE_BEHIND
            special.append(AddedToken(token, normalized=False, special=True, rstrip=behind))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(file: GgufFile, backend: Any) -> None:
    """Let texts begin and end with the tokens that the file says."""
    from tokenizers import processors

    sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    begins = file.flag("tokenizer.ggml.add_bos_token", sentencepiece or _split(file).begins)
    ends = file.flag("tokenizer.ggml.add_eos_token", False)
    tokens = tokens_of(file)
    first = token_id(file, "bos") if begins else None
    last = token_id(file, "eos") if ends else None
    added = [(tokens[token], token) for token in dict.fromkeys([first, last]) if token is not None]
    before = [] if first is None else [f"{tokens[first]}"]
    after = [] if last is None else [f"{tokens[last]}"]
    template = [*before, "$A:0", *after]
    pair = [*template, *(f"{part}:1" for part in before), "$B:1", *(f"{part}:1" for part in after)]
    backend.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=added)


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """Return the template; all of them by their names, where there are several."""
    names = file.texts("tokenizer.chat_templates", [])
    default = file.text(_TEMPLATE, "") or None
    if not names:
        return default
    found = {name: file.text(f"{_TEMPLATE}.{name}") for name in names if name != "default"}
    return {**found, **({} if default is None else {"default": default})}
