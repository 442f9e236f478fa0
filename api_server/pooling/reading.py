"""Turns the texts of a request into the tokens of a one-shot context: prompts, truncation, pairs and templates.

Large requests are tokenized in pieces, so that one of them neither holds a thread for long nor runs on when its client
has left. Knows the served model's facts; knows no dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from api_server.body.item_limits import check_count, check_total
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.state import ServerState
from api_server.text.pooled_model import PooledModel
from api_server.text.text_batches import Bounds, TextBatch
from api_server.text.tokenizer import refuse_long
from shared.pair_template import PairTemplate

# Most texts of one request.
MOST_TEXTS = 2048
# Texts, and characters of texts, that are tokenized in one piece of work.
_TEXTS_AT_A_TIME = 64
_CHARACTERS_AT_A_TIME = 1 << 17
# Characters of a request that is tokenized on the event loop, in about a millisecond: a thread costs as much, as both
# want the interpreter's lock.
_FEW_CHARACTERS = 1 << 10

Item = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a request wants its texts read."""

    # The field that has the texts, for errors.
    field: str = "input"
    truncate: bool = False
    keep_end: bool = False
    # Most tokens of a text; None for the model's own limit.
    most_tokens: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None
    # False for texts that get no prompt, not even the default one.
    prompted: bool = True
    # How a client asks for truncation, for errors.
    remedy: str = ""
    listed: bool = True
    # Index of the first text within the request, for errors.
    first: int = 0
    # False for a part of a request: parts add up, so a thread tokenizes each, however short it is.
    whole: bool = True


async def read_texts(server: ServerState, items: Sequence[Item], reading: Reading) -> TextBatch:
    """Tokenizes texts, and takes token ids as they are. Raises RequestFailed that names the text."""
    model = _model(server)
    _check_number(len(items), reading.field)
    marks = server.token_marks
    kind = (reading.prompt_name or model.files.default_prompt_name or "") if reading.prompted else ""
    most = None if marks is None else marks.rules.most_tokens(kind)
    bounds = _bounds(server, reading, most)
    prompt = model.prompt(reading.prompt_name, "prompt_name") if reading.prompted else ""
    batches = server.batch_tokenizer
    if model.files.is_static(route_of(server, reading)):
        bounds = replace(bounds, add_special_tokens=False)
    left_out = 0
    if prompt and not model.files.includes_prompt:
        left_out = batches.prompt_length(prompt, bounds.add_special_tokens)
        if left_out >= bounds.limit:
            limits = f"the prompt alone has {left_out} tokens, and a text may have {bounds.limit} with it"
            raise invalid(f"{reading.field}: {limits}: allow more tokens, or name another prompt", reading.field)
    sizes = [len(prompt) + len(item) for item in items]
    few = _are_few(reading, sizes)
    parts = []
    for first, group in _groups(items, sizes):
        part = replace(bounds, first=reading.first + first) if first else bounds
        if isinstance(group[0], str):
            texts = [model.prompted(text, prompt) for text in group if isinstance(text, str)]
            job = partial(batches.texts, texts, part)
            batch = job() if few else await server.tokenizer.in_thread(job)
            parts.append(batch.without_prompt(left_out) if left_out else batch)
        else:
            ids = [item for item in group if isinstance(item, list)]
            parts.append(await server.tokenizer.in_thread(partial(_ids, server, ids, part)))
        check_total(sum(len(part.tokens) for part in parts), reading.field)
    batch = TextBatch.joined(parts)
    return batch if marks is None else marks.mark(batch, kind)


async def read_pairs(
    server: ServerState,
    pairs: Sequence[tuple[str, str]],
    reading: Reading,
    *,
    instruction: str | None = None,
    most_of_second: int | None = None,
) -> TextBatch:
    """Tokenizes pairs of texts, in the form that the model was trained on. Raises RequestFailed that names the pair."""
    model = _model(server)
    _check_number(len(pairs), reading.field)
    bounds = _bounds(server, reading)
    template = model.files.pair_template
    if instruction is not None and template is None:
        raise invalid("instruct: this reranker takes no instruction; leave it out", "instruct")
    for text in dict.fromkeys(first for first, _ in pairs):
        refuse_long(len(text), f"the text beside {reading.field}")
    batches = server.batch_tokenizer
    if instruction is not None:
        refuse_long(len(instruction), "instruct")
        # Each pair has it, so it is judged before there are pairs.
        if len(instruction) >= bounds.limit:
            await server.tokenizer.in_thread(partial(batches.check_alone, instruction, bounds, "instruct"))
    # A template is tokenized for each pair, and so are the instruction and the first text in it.
    around = 0 if template is None else len(template.body("", "", instruction))
    sizes = [len(second) if template is None else around + len(one) + len(second) for one, second in pairs]
    few = _are_few(reading, [len(one) + size for (one, _), size in zip(pairs, sizes, strict=True)])
    own = {one: model.prompted(one, "") for one, _ in pairs} if template is None else {}
    parts = []
    for first, group in _groups([second for _, second in pairs], sizes):
        part = replace(bounds, first=reading.first + first) if first else bounds
        chosen = pairs[first : first + len(group)]
        if template is None:
            firsts = [own[text] for text, _ in chosen]
            seconds = [model.prompted(text, "") for _, text in chosen]
            job = partial(batches.pairs, firsts, seconds, part, most_of_second)
        else:
            job = partial(_framed, server, template, chosen, instruction, part, most_of_second)
        parts.append(job() if few else await server.tokenizer.in_thread(job))
        check_total(sum(len(part.tokens) for part in parts), reading.field)
    return TextBatch.joined(parts)


def route_of(server: ServerState, reading: Reading) -> str:
    """The kind of a request's texts, where the served model has modules for each kind; empty for the usual ones."""
    return _model(server).files.route(reading.prompt_name) if reading.prompted else ""


def _ids(server: ServerState, ids: Sequence[list[int]], bounds: Bounds) -> TextBatch:
    """Checks token ids, and takes them as they are."""
    for i, item in enumerate(ids):
        server.tokenizer.check_ids(item, bounds.where(i))
    return server.batch_tokenizer.ids(ids, bounds)


def _framed(
    server: ServerState,
    template: PairTemplate,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    bounds: Bounds,
    most_of_second: int | None,
) -> TextBatch:
    """Tokenizes pairs in the form of a template, which is as long as its texts: runs in a thread."""
    bodies = [server.tokenizer.guarded(template.body, first, second, instruction) for first, second in pairs]
    heads = [template.body(first, "", instruction) for first, _ in pairs]
    frame = (template.prefix, template.suffix)
    return server.batch_tokenizer.framed(bodies, *frame, bounds, heads, most_of_second)


def _are_few(reading: Reading, sizes: Sequence[int]) -> bool:
    """Whether texts of so many characters each are a whole request that is tokenized at once on the event loop."""
    return reading.whole and len(sizes) <= _TEXTS_AT_A_TIME and sum(sizes) <= _FEW_CHARACTERS


def _groups(items: Sequence[Item], sizes: Sequence[int]) -> Iterator[tuple[int, list[Item]]]:
    """Items of one kind that follow each other, with the index of the first: a bounded number, of bounded size in all.

    `sizes` are the characters or ids that are read for each item.
    """
    first = 0
    group: list[Item] = []
    size = 0
    for i, item in enumerate(items):
        other = bool(group) and isinstance(item, str) != isinstance(group[0], str)
        if group and (other or len(group) == _TEXTS_AT_A_TIME or size + sizes[i] > _CHARACTERS_AT_A_TIME):
            yield first, group
            first = i
            group = []
            size = 0
        group.append(item)
        size += sizes[i]
    if group:
        yield first, group


def _model(server: ServerState) -> PooledModel:
    assert server.pooled_model is not None, "the endpoint lets no request through to a model that generates"
    return server.pooled_model


def _bounds(server: ServerState, reading: Reading, most_of_kind: int | None = None) -> Bounds:
    most = server.longest_text
    if most is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "the model is not loaded yet", retry_after=1)
    if most_of_kind is not None:
        most = min(most, most_of_kind)
    return Bounds(
        limit=most if reading.most_tokens is None else min(most, reading.most_tokens),
        truncate=reading.truncate,
        keep_end=reading.keep_end,
        add_special_tokens=reading.add_special_tokens,
        field=reading.field,
        remedy=reading.remedy,
        first=reading.first,
        listed=reading.listed,
    )


def _check_number(texts: int, field: str) -> None:
    if not texts:
        raise invalid(f"{field} must not be empty", field)
    check_count(texts, "texts", field, MOST_TEXTS)
