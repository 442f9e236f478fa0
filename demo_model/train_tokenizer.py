"""The tokenizer of the embedded model: byte-level BPE trained on the corpus, with ChatML marks and single digits.

Knows tokens and the chat template file. Does not know the model.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo_model import words
from demo_model.corpus import Corpus, RawText
from demo_model.exchange import Message
from demo_model.skills import tool_definitions
from demo_model.skills.json_answers import dumped
from deploy.embedded_model import EMBEDDED_MODEL_PATH

VOCABULARY_SIZE = 4096
MAX_LENGTH = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Stands for a part of a picture.
IMAGE_TOKEN = "<image>"
# How the vocabulary writes the byte 255, which no UTF-8 text has.
_UNUSED_BYTE = "ÿ"
# Visible in decoded text, because parsers of tools and reasoning look for them there.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A word with or without its space, one digit (so that sums line up), a run of signs, line breaks, spaces.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

_COPIED_TIMES = 40

CHAT_TEMPLATE = EMBEDDED_MODEL_PATH / "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE.name)


def train_tokenizer(seed: int, documents: int = 30_000) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKUP_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(Corpus(seed), documents), trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return wrapped(bpe)


def wrapped(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=with_image_token(bpe),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": IMAGE_TOKEN},
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def with_image_token(bpe: Tokenizer) -> Tokenizer:
    """Give the number of a byte that no text has to the image token. The model's size and all other tokens stay."""
    form = json.loads(bpe.to_str())
    vocabulary: dict[str, int] = form["model"]["vocab"]
    if IMAGE_TOKEN not in vocabulary:
        names = [IMAGE_TOKEN if token == _UNUSED_BYTE else token for token in vocabulary]
        form["model"]["vocab"] = dict(zip(names, vocabulary.values(), strict=True))
    made = Tokenizer.from_str(json.dumps(form))
    made.no_truncation()
    made.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    return made


def _texts(corpus: Corpus, count: int) -> Iterator[str]:
    """Only what people and the model say: the marks of the template are tokens of their own and need no merges.

    And each word of tools and JSON in both forms, so that copying one is copying a token, not spelling.
    """
    copied = {*words.COMMON, *words.ADJECTIVES, *words.MORE, *words.CATEGORIES["animals"], *tool_definitions.NAME_PARTS}
    copied |= {*words.NAMES, *(part for city in words.CITIES for part in city.split())}
    for word in sorted(copied):
        yield f'"{word} {word}"' * _COPIED_TIMES
    for document in islice(corpus.documents(), count):
        if isinstance(document, RawText):
            yield document.text
            continue
        yield from (dumped(tool) for tool in document.tools)
        yield from (_text_of(message) for message in document.messages)


def _text_of(message: Message) -> str:
    calls: list[Any] = message.get("tool_calls", [])
    return "\n".join(
        (message["role"], message.get("reasoning_content", ""), message["content"], *(dumped(call) for call in calls))
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the files; the class gets the name that every release of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(folder)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise TypeError(f"{folder} has a {type(loaded).__name__}; the embedded model needs a fast tokenizer")
    return loaded
