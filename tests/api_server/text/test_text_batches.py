"""Batches of texts and pairs get the tokens that transformers gives them, cut or not, one by one."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors, trainers

from api_server.errors import ErrorKind, RequestFailed
from api_server.text.text_batches import BatchTokenizer, Bounds, TextBatch
from tests.api_server.conftest import CORPUS, byte_level_backend, metaspace_backend
from tests.api_server.pooling.conftest import wordpiece_backend

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "Hello,",
    "world!",
    "naïve",
    "café",
    "日本語のテキスト",
    "😀",
    "Привет",
]
WORDS += ["fox.", "ö", "", "\n", "\t", "x1y2"]


def unigram_backend() -> Backend:
    """Like XLM-R's."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend


BACKENDS = {
    "wordpiece": wordpiece_backend,
    "byte level": byte_level_backend,
    "metaspace": metaspace_backend,
    "unigram": unigram_backend,
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = BACKENDS[request.param]()
    return found


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) or "x"


def texts_of(batch: TextBatch) -> list[list[int]]:
    ends = batch.lengths.cumsum().tolist()
    return [batch.tokens[end - n : end].tolist() for end, n in zip(ends, batch.lengths.tolist(), strict=True)]


def reference(backend: Backend, most: int | None, direction: str = "right", strategy: str = "longest_first") -> Backend:
    """The library's own truncation, on a copy."""
    copy: Backend = type(backend).from_str(backend.to_str())
    if most is not None:
        copy.enable_truncation(most, strategy=strategy, direction=direction)
    return copy


def test_texts_are_tokenized_as_alone(backend: Backend) -> None:
    rng = random.Random(1)
    texts = [text(rng, rng.randrange(1, 60)) for _ in range(50)]
    batch = BatchTokenizer(backend, False).texts(texts, Bounds(limit=10_000))
    assert texts_of(batch) == [backend.encode(each).ids for each in texts]
    assert batch.token_types is None
    plain = BatchTokenizer(backend, False).texts(texts, Bounds(limit=10_000, add_special_tokens=False))
    assert texts_of(plain) == [backend.encode(each, add_special_tokens=False).ids for each in texts]


@pytest.mark.parametrize("keep_end", [False, True])
def test_texts_are_cut_as_the_library_cuts_them(backend: Backend, keep_end: bool) -> None:
    """Long ones are tokenized in part only: the tokens that are kept are those of the whole text."""
    rng = random.Random(2)
    for most in (3, 16, 70):
        texts = [text(rng, rng.choice([1, 5, 30, 300, 3000])) for _ in range(20)]
        bounds = Bounds(limit=most, truncate=True, keep_end=keep_end)
        batch = BatchTokenizer(backend, False).texts(texts, bounds)
        whole = reference(backend, most, "left" if keep_end else "right")
        assert texts_of(batch) == [whole.encode(each).ids for each in texts]


def test_a_cut_text_is_not_tokenized_whole() -> None:
    """A text far beyond what may be tokenized at once is no error when it is cut."""
    backend = wordpiece_backend()
    batch = BatchTokenizer(backend, False).texts(["fox " * 2_000_000], Bounds(limit=16, truncate=True))
    assert batch.lengths.tolist() == [16]
    with pytest.raises(RequestFailed, match=r"input\[0\] has 8000000 characters") as refused:
        BatchTokenizer(backend, False).texts(["fox " * 2_000_000], Bounds(limit=16))
    assert refused.value.kind is ErrorKind.TOO_LONG


def test_words_without_spaces_are_cut_right() -> None:
    """A word that becomes one unknown token, and one that becomes many."""
    backend = wordpiece_backend()
    for word in ("z" * 20_000, "fox" * 33, "日本" * 5000):
        for keep_end in (False, True):
            batch = BatchTokenizer(backend, False).texts([word], Bounds(limit=12, truncate=True, keep_end=keep_end))
            assert texts_of(batch) == [reference(backend, 12, "left" if keep_end else "right").encode(word).ids]


def test_errors_name_the_text_and_its_tokens(backend: Backend) -> None:
    batches = BatchTokenizer(backend, False)
    tokens = len(backend.encode("fox " * 40).ids)
    with pytest.raises(RequestFailed, match=rf"input\[7\] has {tokens} tokens; .* at most 20: shorten it, or send x"):
        batches.texts(["fox", "the fox", "fox " * 40, "fox " * 50], Bounds(limit=20, first=5, remedy="x"))
    with pytest.raises(RequestFailed, match=r"^input has 3 tokens"):
        batches.ids([[5, 6, 7]], Bounds(limit=2, listed=False))
    with pytest.raises(RequestFailed, match=r"input\[1\] has no tokens"):
        batches.texts(["fox", ""], Bounds(limit=20, add_special_tokens=False))
    assert texts_of(batches.ids([[5, 6, 7], [8]], Bounds(limit=2, truncate=True))) == [[5, 6], [8]]
    assert texts_of(batches.ids([[5, 6, 7]], Bounds(limit=2, truncate=True, keep_end=True))) == [[6, 7]]


def test_pairs_are_joined_and_typed() -> None:
    backend = wordpiece_backend()
    rng = random.Random(3)
    pairs = [(text(rng, rng.randrange(1, 8)), text(rng, rng.choice([1, 20, 2000]))) for _ in range(30)]
    whole = reference(backend, 48, strategy="only_second")
    expected = [whole.encode(*pair) for pair in pairs]
    firsts, seconds = zip(*pairs, strict=True)
    batch = BatchTokenizer(backend, True).pairs(firsts, seconds, Bounds(limit=48, truncate=True))
    assert texts_of(batch) == [each.ids for each in expected]
    assert batch.token_types is not None
    assert batch.token_types.tolist() == [kind for each in expected for kind in each.type_ids]
    assert BatchTokenizer(backend, False).pairs(firsts, seconds, Bounds(limit=48, truncate=True)).token_types is None


def test_pairs_whose_document_is_cut_in_any_case() -> None:
    backend = wordpiece_backend()
    batches = BatchTokenizer(backend, True)
    batch = batches.pairs(["the fox"], ["fox " * 50], Bounds(limit=512), most_of_second=5)
    assert texts_of(batch) == [backend.encode("the fox", "fox " * 5).ids]
    with pytest.raises(RequestFailed, match=r"documents\[1\] has 55 tokens"):
        batches.pairs(["the fox"] * 2, ["fox", "fox " * 50], Bounds(limit=20, field="documents"))
    with pytest.raises(RequestFailed, match=r"the text beside documents\[0\] has 33 tokens"):
        batches.pairs(["fox " * 30], ["fox"], Bounds(limit=20, truncate=True, field="documents"))


def test_framed_texts_keep_their_frame(backend: Backend) -> None:
    batches = BatchTokenizer(backend, False)
    before, after = (backend.encode(each, add_special_tokens=False).ids for each in ("The ", " you?"))
    bodies = [["Hello, fox " * 30], ["Hello", ", fox"]]
    whole = backend.encode(bodies[0][0], add_special_tokens=False).ids
    parts = [token for part in bodies[1] for token in backend.encode(part, add_special_tokens=False).ids]
    room = 40 - len(before) - len(after)
    batch = batches.framed(bodies, "The ", " you?", Bounds(limit=40, truncate=True))
    assert texts_of(batch) == [[*before, *whole[:room], *after], [*before, *parts[:room], *after]]
    head = len(backend.encode("Hello, fox", add_special_tokens=False).ids)
    short = batches.framed(bodies, "The ", " you?", Bounds(limit=512), ["Hello, fox", "Hello, fox"], 3)
    assert texts_of(short)[0] == [*before, *whole[: head + 3], *after]
    kept = batches.framed(bodies, "The ", " you?", Bounds(limit=40, truncate=True, keep_end=True), ["Hello"] * 2)
    assert texts_of(kept) == texts_of(batch)
    with pytest.raises(RequestFailed, match=r"the text beside documents\[1\] has .* shorten it"):
        batches.framed(
            [["fox"], ["fox " * 60]],
            "The ",
            " you?",
            Bounds(limit=40, truncate=True, field="documents"),
            ["fox", "fox " * 60],
        )


def test_parts_with_and_without_types_are_joined() -> None:
    joined = TextBatch.joined([TextBatch.of([[1, 2]]), TextBatch.of([[3], [4, 5]], [[1], [0, 1]])])
    assert joined.tokens.tolist() == [1, 2, 3, 4, 5]
    assert joined.lengths.tolist() == [2, 1, 2]
    assert joined.token_types is not None
    assert joined.token_types.tolist() == [0, 0, 1, 0, 1]


def test_tokens_of_a_prompt_are_marked() -> None:
    """As sentence-transformers counts them: the tokenizer's own beginning and the prompt, without its end."""
    backend = wordpiece_backend()
    batches = BatchTokenizer(backend, True)
    count = batches.prompt_length("the quick ")
    assert count == 1 + len(backend.encode("the quick ", add_special_tokens=False).ids)
    batch = batches.texts(["the quick fox", "the"], Bounds(limit=20)).without_prompt(count)
    fox = len(backend.encode("the quick fox").ids) - count
    assert batch.token_types is not None
    assert batch.token_types.tolist() == [-1] * count + [0] * fox + [-1] * min(3, count) + [0] * max(0, 3 - count)
