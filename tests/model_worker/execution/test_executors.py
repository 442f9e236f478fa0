"""Which executor takes which step, and that the overlapped ones give the tokens of the synchronous one."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from interfaces import LogprobMode, SamplingParams, Step, StepResult
from model_worker.execution import overlap_cuda
from model_worker.execution.isolation import Isolation
from model_worker.execution.overlap_cpu import OverlapCpu
from model_worker.execution.overlap_cuda import OverlapCuda
from model_worker.execution.speculation import Speculation
from model_worker.execution.synchronous import Synchronous
from model_worker.grammar.apply_mask import apply_masks
from model_worker.grammar.masks import Masks
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.sampling.draw_records import RowMasks
from tests.model_worker.execution.tiny_worker import ROWS, TinyWorker, join
from tests.model_worker.tiny_models import VOCAB, tiny_model

PROMPT = [5, 6, 7, 8]
OVERLAPPED = {"cpu": "OverlapCpu", "cuda": "OverlapCuda", "off": "Synchronous"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tiny_model("llama", tmp_path_factory.mktemp("executors"), seed=1)
    return load_model(path, "float32", "cpu", lambda *_: None)


@pytest.mark.parametrize(
    ("overlap", "most_guesses", "expected"),
    [
        ("off", 0, [Isolation, Synchronous]),
        ("off", 3, [Isolation, Speculation, Synchronous]),
        ("cpu", 0, [Isolation, OverlapCpu, Synchronous]),
        ("cpu", 3, [Isolation, Speculation, OverlapCpu, Synchronous]),
        ("cuda", 3, [Isolation, OverlapCuda, Synchronous]),
        ("mps", 0, [Isolation, Synchronous]),
    ],
)
def test_a_device_has_its_executors(loaded: LoadedModel, overlap: str, most_guesses: int, expected: list[type]) -> None:
    worker = TinyWorker(loaded, overlap, most_guesses)
    assert [type(executor) for executor in worker.executors] == expected


@pytest.mark.parametrize("overlap", ["cpu", "cuda", "off"])
def test_greedy_steps_overlap(loaded: LoadedModel, overlap: str) -> None:
    worker = TinyWorker(loaded, overlap)
    worker.prefill(join(0, PROMPT), join(1, PROMPT[:3]))
    first, second = worker.begin([0, 1]), worker.begin([0, 1])
    assert worker.taken == [OVERLAPPED[overlap]] * 2
    assert [first.done, second.done] == [overlap == "off"] * 2
    assert len(worker.shared.in_flight) == (0 if overlap == "off" else 2)
    assert [first.result().step, second.result().step] == [1, 2]
    assert worker.shared.rows.owners(worker.shared.rows.pack(worker.step([0, 1]))) is None


# What a device draws by itself, and what only the host does.
DRAWN_THERE: tuple[dict[str, Any], ...] = (
    {"logprobs": LogprobMode.TEMPERED},
    {"min_new_tokens": 9, "stop_token_ids": [3]},
    {"logit_bias": {5: 4.0}},
    {"frequency_penalty": 0.5},
    {"bad_words": [[3], [4]]},
)
DRAWN_BY_THE_HOST: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"watermark": True}, {}),
    ({"bad_words": [[3, 4]]}, {}),
    ({}, {"hidden_from": 0}),
)


@pytest.mark.parametrize(
    ("overlap", "params", "fields"),
    [
        *(("cpu", params, {}) for params in DRAWN_THERE),
        *(("cpu", params, fields) for params, fields in DRAWN_BY_THE_HOST),
        *(("cuda", params, fields) for params, fields in DRAWN_BY_THE_HOST),
    ],
)
def test_rows_that_need_the_host_wait(loaded: LoadedModel, overlap: str, params: Any, fields: Any) -> None:
    worker = TinyWorker(loaded, overlap)
    worker.prefill(join(0, PROMPT), join(1, PROMPT, SamplingParams(temperature=0.0, **params), **fields))
    worker.begin([0])
    pending = worker.begin([0, 1])
    assert worker.taken == [OVERLAPPED[overlap], "Synchronous"]
    assert pending.done
    worker.begin([0]).result()
    assert worker.taken[-1] == OVERLAPPED[overlap]


@pytest.mark.parametrize("params", DRAWN_THERE)
def test_rows_that_a_device_draws_keep_the_second_step_in_flight(loaded: LoadedModel, params: Any) -> None:
    worker, plain = TinyWorker(loaded, "cuda"), TinyWorker(loaded)
    for each in (worker, plain):
        each.prefill(join(0, PROMPT), join(1, PROMPT, SamplingParams(temperature=0.0, **params)))
    launched = [worker.begin([0, 1]) for _ in range(3)]
    assert worker.taken == ["OverlapCuda"] * 3
    assert len(worker.shared.in_flight) == 3
    for pending in launched:
        got, want = pending.result(), plain.begin([0, 1]).result()
        assert got.tokens.tolist() == want.tokens.tolist()
        if want.logprobs is None:
            assert got.logprobs is None
        else:
            assert got.logprobs is not None
            np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5)


def test_a_step_without_memory_for_what_it_has_counted_is_not_repeated(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = TinyWorker(loaded, "cuda")
    worker.prefill(join(0, PROMPT), join(1, PROMPT, SamplingParams(temperature=0.0, presence_penalty=1.0)))

    def none_left(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(overlap_cuda, "Download", none_left)
    # Without a count it runs again, by the executor that takes every step.
    assert len(worker.begin([0]).result().tokens) == 1
    with pytest.raises(torch.OutOfMemoryError):
        worker.begin([0, 1])


@pytest.mark.parametrize("params", [{}, *DRAWN_THERE])
def test_a_step_in_which_no_row_draws_is_launched(loaded: LoadedModel, params: Any) -> None:
    worker, plain = TinyWorker(loaded, "cuda"), TinyWorker(loaded)
    parts = [([0], [3], [join(0, PROMPT, SamplingParams(temperature=0.0, **params))]), ([0], [1], [])]
    got, want = ([each.begin(*part) for part in parts] for each in (worker, plain))
    assert [len(pending.result().tokens) for pending in got] == [0, 1]
    assert got[1].result().tokens.tolist() == want[1].result().tokens.tolist()
    assert worker.taken == ["OverlapCuda"] * 2


@pytest.mark.parametrize("overlap", ["cpu", "cuda"])
@pytest.mark.parametrize("fields", [{"report_from": 1}, {"embeddings": np.zeros((2, 48), np.float32)}])
def test_prompts_with_more_than_tokens_wait(loaded: LoadedModel, overlap: str, fields: Any) -> None:
    worker = TinyWorker(loaded, overlap)
    worker.begin([0], [4], [join(0, PROMPT, **fields)]).result()
    worker.begin([0], joins=[]).result()
    assert worker.taken == ["Synchronous", OVERLAPPED[overlap]]


@pytest.mark.parametrize(("overlap", "taker"), [("cpu", "Synchronous"), ("cuda", "OverlapCuda")])
def test_drawn_rows_overlap_where_the_device_draws(loaded: LoadedModel, overlap: str, taker: str) -> None:
    worker = TinyWorker(loaded, overlap)
    worker.prefill(join(0, PROMPT, SamplingParams(temperature=0.8, top_p=0.9, seed=1)))
    worker.begin([0]).result()
    assert worker.taken == [taker]


class Ascending:
    """Masks of row 1: each token is larger than the one before, and one from 11 to 24 forces the next two."""

    def __init__(self, last: int) -> None:
        self.last = last

    def constrain(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows == 1)

    def of(self, rows: np.ndarray) -> tuple[RowMasks | None, dict[int, str]]:
        index = np.flatnonzero(rows == 1)
        bits = np.ones((len(index), -(-VOCAB // 32) * 32), np.uint8)
        bits[:, : self.last + 1] = 0
        return RowMasks(index, np.packbits(bits, axis=1, bitorder="little").view(np.int32)), {}

    def apply(self, logits: Any, rows: np.ndarray) -> dict[int, str]:
        masks, failed = self.of(rows)
        assert masks is not None
        apply_masks(logits, *masks)
        return failed

    def flush(self) -> None:
        """Nothing is sent anywhere."""

    def sampled(self, rows: np.ndarray, tokens: np.ndarray) -> dict[int, list[int]]:
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if row == 1:
                assert token > self.last
                self.last = token
                if 10 < token < 25:
                    self.last = token + 2
                    return {1: [token + 1, token + 2]}
        return {}


def test_a_cpu_draws_grammars_with_the_synchronous_executor(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, "cpu")
    worker.prefill(join(0, PROMPT * 3), join(1, PROMPT))
    worker.shared.masks = cast(Masks, Ascending(2))
    step = worker.step([0, 1])
    packed = worker.shared.rows.pack(step)
    accepting = [type(executor) for executor in worker.executors if executor.accepts(step, packed)]
    assert accepting == [Synchronous]


def test_a_grammar_waits_for_the_token_before_it_and_not_for_its_own(loaded: LoadedModel) -> None:
    worker, plain = TinyWorker(loaded, "cuda"), TinyWorker(loaded)
    told = []
    for each in (worker, plain):
        # The least token that may come is the most likely one.
        bias = {token: -min(100.0, 3.0 * token) for token in range(VOCAB)}
        biased = SamplingParams(temperature=0.0, logit_bias=bias)
        each.prefill(join(0, PROMPT), join(1, PROMPT, biased))
        each.shared.masks = cast(Masks, Ascending(2))
        launched: list[Any] = []
        for _ in range(14):
            launched.append(each.begin([0, 1]))
            if each is worker:
                assert not launched[-1].done
        results = [pending.result() for pending in launched]
        runs = [{} if r.forced is None else r.forced.runs() for r in results]
        forced = [{row: run.tolist() for row, run in each_run.items()} for each_run in runs]
        told.append([(r.rows.tolist(), r.tokens.tolist(), run) for r, run in zip(results, forced, strict=True)])
        text = each.shared.rows.text(1)
        assert list(text[len(PROMPT) :]) == sorted(set(text[len(PROMPT) :]))
    assert any(run for *_, run in told[0])
    # While a row goes on by tokens that its grammar has forced, the synchronous executor draws nothing for it, either.
    assert told[0] == told[1]


@pytest.mark.parametrize("overlap", ["cpu", "cuda", "off"])
def test_while_a_row_is_isolated_every_step_is_cut(loaded: LoadedModel, overlap: str) -> None:
    worker = TinyWorker(loaded, overlap, most_guesses=3)
    worker.prefill(join(0, PROMPT), join(1, PROMPT))
    calls: list[int] = []
    forward = worker.backend.logits
    greedy = worker.backend.greedy

    def counted(batch: Any, *wanted: Any) -> Any:
        calls.append(batch.num_sequences)
        return greedy(batch, *wanted) if wanted else forward(batch)

    worker.backend.logits = counted
    worker.backend.greedy = counted
    pending = worker.begin([0, 2, 1], [1, 4, 1], [join(2, PROMPT, isolated=True)])
    assert pending.result().rows.tolist() == [0, 2, 1]
    assert sorted(calls) == [1, 2]
    worker.begin([0], ahead=3).result()
    worker.begin([0], drop=[2]).result()
    assert worker.taken == ["Isolation", "Isolation", OVERLAPPED[overlap]]


@pytest.mark.parametrize("overlap", ["cpu", "cuda"])
def test_a_step_that_waits_has_the_tokens_that_were_not_read(loaded: LoadedModel, overlap: str) -> None:
    biased = SamplingParams(temperature=0.0, logit_bias={5: 1.0})
    told = []
    for worker in (TinyWorker(loaded), TinyWorker(loaded, overlap)):
        worker.prefill(join(0, PROMPT), join(1, PROMPT, biased))
        first = worker.begin([0])
        second = worker.begin([0, 1])
        told.append([first.result().tokens.tolist(), second.result().tokens.tolist()])
    assert told[0] == told[1]


@pytest.mark.parametrize("overlap", ["cpu", "cuda", "off"])
def test_a_refused_row_fails_with_its_first_token(loaded: LoadedModel, overlap: str) -> None:
    worker = TinyWorker(loaded, overlap)
    refused = SamplingParams(temperature=0.0, allowed_token_ids=[VOCAB])
    worker.prefill(join(0, PROMPT))
    result = worker.begin([0, 1], [1, 4], [join(1, PROMPT, refused)]).result()
    assert worker.taken == [OVERLAPPED[overlap]]
    assert result.rows.tolist() == [0]
    assert list(result.errors) == [1]
    assert "allowed_token_ids" in result.errors[1]


def test_a_row_whose_text_comes_again_is_guessed(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, "cpu", most_guesses=3)
    plain = TinyWorker(loaded)
    for each in (worker, plain):
        each.prefill(join(0, PROMPT * 3), join(1, PROMPT))
        # A sequence that goes on as it has begun, whatever the model says.
        each.shared.rows._tokens[0, 12] = PROMPT[0]
    result = worker.begin([0], ahead=5).result()
    assert worker.taken == ["Speculation"]
    counters = worker.engine.counters
    more = [] if result.more is None else result.more.tokens.tolist()
    assert (counters.drafted, counters.accepted) == (3, len(more))
    for token in [*result.tokens.tolist(), *more]:
        assert plain.begin([0]).result().tokens.tolist() == [token]
    assert worker.shared.rows.known.tolist() == plain.shared.rows.known.tolist()
    assert worker.shared.rows.computed.tolist() == plain.shared.rows.computed.tolist()
    worker.taken.clear()
    worker.begin([0]).result()  # without room
    assert worker.taken == ["OverlapCpu"]


def test_there_are_as_many_guesses_as_have_room(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, "cpu", most_guesses=3)
    worker.prefill(join(0, PROMPT * 3))
    worker.shared.rows._tokens[0, 12] = PROMPT[0]
    worker.begin([0], ahead=2).result()
    assert worker.engine.counters.drafted == 2


def test_a_right_guess_after_which_nothing_can_be_drawn_ends_the_answer_of_the_step(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, most_guesses=3)
    worker.prefill(join(0, PROMPT * 3))
    text = worker.shared.rows._tokens[0]
    text[12] = PROMPT[0]
    greedy = worker.backend.greedy

    def broken(batch: Any, wanted: Any) -> Any:
        _, logits = greedy(batch, wanted)
        return np.array([PROMPT[1], PROMPT[2], -1, PROMPT[0]][: batch.num_tokens]), logits

    worker.backend.greedy = broken
    result = worker.begin([0], ahead=3).result()
    assert result.tokens.tolist() == [PROMPT[1]]
    assert not result.errors
    assert result.more is not None
    assert result.more.tokens.tolist() == [PROMPT[2]]
    worker.backend.greedy = lambda batch, wanted: (np.array([-1]), greedy(batch, wanted)[1])
    assert list(worker.begin([0]).result().errors) == [0]


def test_a_row_with_an_unread_token_is_read_before_it_is_guessed(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, "cpu", most_guesses=3)
    plain = TinyWorker(loaded)
    for each in (worker, plain):
        each.prefill(join(0, PROMPT * 3))
        each.shared.rows._tokens[0, 12] = PROMPT[3]
    text = worker.shared.rows._tokens[0]
    first = worker.begin([0])
    # What lies behind the text that was read must not be taken for a part of it.
    text[13] = PROMPT[0]
    second = worker.begin([0], ahead=5)
    assert worker.taken == ["OverlapCpu", "OverlapCpu"]
    assert worker.shared.drafters is not None
    worker.shared.drafters.may_guess = lambda *_: True  # type: ignore[method-assign]
    third = worker.begin([0], ahead=5)
    assert worker.taken[-1] == "Speculation"
    assert first.done
    assert second.done
    assert not worker.shared.in_flight
    got = [pending.result().tokens.tolist() for pending in (first, second, third)]
    assert got == [plain.begin([0]).result().tokens.tolist() for _ in range(3)]


Sequence = tuple[list[int], SamplingParams]
"""A prompt, and what it asks for: exactly `max_new_tokens`, so that steps do not depend on tokens."""


def greedy_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=rng.randint(1, 30))


def drawn_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 1.6]),
        top_k=rng.choice([-1, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(2**64),
        max_new_tokens=rng.randint(1, 30),
    )


def biased_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(temperature=0.0, logit_bias={rng.randrange(VOCAB): 3.0}, max_new_tokens=rng.randint(1, 30))


MOSTLY_GREEDY = (greedy_params,) * 4


def schedule(worker: TinyWorker, sequences: list[Sequence], rng: random.Random) -> list[tuple[Step, dict[int, int]]]:
    """Steps that serve the sequences, each with the sequence of every row: rows are used again and again."""
    waiting = deque(range(len(sequences)))
    owners: dict[int, int] = {}
    left: dict[int, int] = {}
    drop: list[int] = []
    steps = []
    while waiting or owners:
        joins = []
        for row in range(ROWS):
            if row not in owners and waiting and rng.random() < 0.7:
                owners[row] = waiting.popleft()
                prompt, params = sequences[owners[row]]
                left[row] = params.max_new_tokens or 0
                joins.append(join(row, prompt, params))
        if not owners:
            continue
        rows = rng.sample(sorted(owners), len(owners))
        lengths = {joined.row: len(joined.tokens) for joined in joins}
        ntok = [lengths.get(row, 1) for row in rows] if joins else None
        steps.append((worker.step(rows, ntok, joins, drop), dict(owners)))
        for row in rows:
            left[row] -= 1
        drop = [row for row in rows if not left[row]]
        for row in drop:
            del owners[row], left[row]
    return steps


def run(worker: TinyWorker, steps: list[tuple[Step, dict[int, int]]]) -> dict[int, list[int]]:
    """Tokens by sequence. A step is begun before the one before is read."""
    tokens: dict[int, list[int]] = defaultdict(list)
    launched: deque[Any] = deque()

    def read(keep: int) -> None:
        while len(launched) > keep:
            pending, owners = launched.popleft()
            result: StepResult = pending.result()
            assert not result.errors
            for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
                tokens[owners[row]].append(token)

    for step, owners in steps:
        launched.append((worker.engine.begin(step), owners))
        read(1)
    read(0)
    return tokens


@pytest.mark.parametrize("kinds", [(greedy_params,), (*MOSTLY_GREEDY, drawn_params), (*MOSTLY_GREEDY, biased_params)])
@pytest.mark.parametrize("overlap", ["cpu", "cuda"])
def test_an_overlapped_executor_gives_the_tokens_of_the_synchronous_one(
    loaded: LoadedModel, overlap: str, kinds: Any
) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(16)]
    chosen = [rng.choice(kinds) for _ in prompts]
    sequences = [(prompt, kind(rng)) for prompt, kind in zip(prompts, chosen, strict=True)]
    # The last one is by itself in the end, so that some steps are greedy.
    sequences.append((prompts[0], SamplingParams(temperature=0.0, max_new_tokens=60)))
    plain = TinyWorker(loaded)
    overlapped = TinyWorker(loaded, overlap)
    steps = schedule(plain, sequences, rng)
    expected = run(plain, steps)
    assert [len(expected[i]) for i in range(17)] == [params.max_new_tokens for _, params in sequences]
    assert run(overlapped, steps) == expected, f"seed {seed}"
    assert set(plain.taken) == {"Synchronous"}
    assert OVERLAPPED[overlap] in overlapped.taken
    host = {"cpu": (drawn_params, biased_params), "cuda": ()}[overlap]
    assert ("Synchronous" in overlapped.taken) == any(kind in host for kind in chosen)
