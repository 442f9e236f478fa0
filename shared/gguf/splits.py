"""How texts are split before byte pairs are merged, by the names that converters give (tokenizer.ggml.pre).

A split is a sequence of patterns; each cuts what those before it have left.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS
_LLAMA3 = _WORDS % "{1,3}"
_QWEN2 = _WORDS % ""
# Words by the case of their letters.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(tail)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(tail)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDS
)
_TEKKEN = _CASED % {"tail": "", "digits": ""}
_GPT4O = _CASED % {"tail": f"{_CONTRACTIONS}?", "digits": "{1,3}"}
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _ENDS,
)


class Split(NamedTuple):
    """What comes before the merges of a vocabulary of byte pairs."""

    patterns: tuple[str, ...]
    composed: bool = False  # texts are brought into Unicode's composed form (NFC) first
    ignores_merges: bool = False  # a piece that is a token is not cut
    begins: bool = False  # texts begin with the beginning token, unless the file says otherwise


_BEGINS = Split((_LLAMA3,), ignores_merges=True, begins=True)
_BY_SPLIT = {
    Split((_GPT2,)): "gpt-2 phi-2 mpt olmo jais exaone4 mellum gigachat a.x-4.0 trillion granite-docling",
    Split((r"\p{N}", _GPT2)): "starcoder refact command-r smollm codeshell exaone minerva-7b",
    _BEGINS: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0",
    Split((_LLAMA3,)): "dbrx smaug-bpe",
    Split((_QWEN2,), composed=True): "qwen2 deepseek-r1-qwen kormo megrez",
    Split((_TEKKEN,), ignores_merges=True, begins=True): "tekken",
    Split((_GPT4O,)): "gpt-4o llama4 kanana2",
    Split(_DEEPSEEK_CODER): "deepseek-coder",
    Split(_DEEPSEEK_V3): "deepseek-v3",
}
SPLITS = {name: split for split, names in _BY_SPLIT.items() for name in names.split()}
