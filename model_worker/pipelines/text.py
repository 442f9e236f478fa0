"""Text generation within one process: a pipeline over the same `Engine.step` that the worker's loop runs.

It keeps a row and KV blocks for every request from its first batch to `release`. A request's state is its context,
which callers may also change between steps (reset, roll back, jump ahead): row and grammar follow it. Does not know
text, and neither queues nor evicts: a batch that does not fit is refused as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    BatchLogitsProcessor,
    GenerationStatus,
    Join,
    LogProbabilities,
    Pipeline,
    RequestID,
    RowGrammar,
    Step,
    StepResult,
    TextAndVisionContext,
    TextContext,
    TextGenerationInputs,
    TextGenerationOutput,
)
from model_worker.capacity import Capacity, capacity_for
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.grammar import mask_process
from model_worker.grammar.masks import Masks
from model_worker.hearing.rules import rules_processor
from model_worker.loading.load import load_model
from model_worker.pipelines.adapters import PipelineAdapters
from model_worker.pipelines.checks import check_context
from model_worker.pipelines.guesses import PipelineGuesses, following_tokens, guesses_of_option
from model_worker.pipelines.processed_logits import ProcessedLogits
from model_worker.pipelines.values import values_of, wants_logprobs
from model_worker.rows import WorkerRows
from model_worker.runner import ModelRunner
from model_worker.sampling.registry import Processor, check_named, load_processors
from model_worker.sampling.sampler import SamplerRows
from model_worker.speech.token_order import order_processor
from model_worker.vision.encoder import EncoderCache
from model_worker.vision.family import Sight
from model_worker.vision.rows import ImageRows
from shared.setting_forms import entries
from shared.speech_tokens import SpeechTokenFiles


@dataclass(slots=True)
class _Row:
    """The engine's state of one request: the first `computed` of `tokens` are in the blocks."""

    index: int
    blocks: list[int] = field(default_factory=list)
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    computed: int = 0
    # The handle of its adapter; 0: the base model.
    adapter: int = 0
    # Whether there was no memory for it, although it was computed alone.
    failed_alone: bool = False


class TextPipeline(Pipeline[TextGenerationInputs[TextContext], TextGenerationOutput]):
    """Generates tokens; also a `TokenGenerator`. Must not be used from two threads at once."""

    def __init__(
        self,
        runner: ModelRunner,
        capacity: Capacity,
        max_batch_tokens: int = 512,
        batch_processors: Sequence[BatchLogitsProcessor] = (),
        masks: Masks | None = None,
        processors: Mapping[str, Processor] | None = None,
        most_guesses: int = 0,
        learns: bool = False,
    ) -> None:
        """`masks`, for grammars without jumps, are closed by `close`. Requests may name `processors`.

        Up to `most_guesses` tokens of each request are guessed, or what contexts bring; where it `learns`, what pays.
        """
        rows = WorkerRows(capacity.max_rows, capacity.max_model_len, capacity.block_size, capacity.num_blocks)
        sampler = SamplerRows(capacity.max_rows, runner.loaded.vocab_size, runner.loaded.device, processors)
        self._runner = runner
        encoder = runner.loaded.encoder
        self._images = None if encoder is None else ImageRows(encoder, EncoderCache(encoder.cache_bytes))
        self._logits = ProcessedLogits(runner.backend, batch_processors)
        shared = DeviceStep(rows, sampler, self._logits, WorkerIdentity(0, 0), masks, self._images)
        self._guesses = PipelineGuesses(most_guesses, learns)
        most = self._guesses.most(capacity.max_model_len)
        self._engine = Engine(shared, executors_for(shared, "off", most, learns, self._guesses.drafters))
        self._guessing = shared.drafters is not None
        self._masks = masks
        self._capacity = capacity
        self._max_batch_tokens = max_batch_tokens
        self._processors = processors or {}
        self._adapters = PipelineAdapters(runner.backend)
        self._rows: dict[RequestID, _Row] = {}
        self._free_rows = deque(range(capacity.max_rows))
        self._free_blocks = deque(range(capacity.num_blocks))
        self._dropped: list[int] = []
        self._steps = 0
        # Tokens that each request may still get in the call in progress.
        self._left: dict[RequestID, int] = {}

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: str = "none",
        max_batch_size: int = 16,
        max_length: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "auto",
        max_batch_tokens: int = 512,
        batch_processors: Sequence[BatchLogitsProcessor] = (),
        logit_processors: str = "",
        speculate: int | str = 0,
    ) -> TextPipeline:
        """Load a Hugging Face directory or hub name. ValueError says why a model cannot be served.

        On a CPU `quantization` may be int8, and `kv_dtype` int8 or fp8. `max_length` bounds prompt and answer of one
        request in tokens, `kv_memory` is in bytes, and `max_batch_tokens` are what one forward pass takes: longer
        prompts take several. `logit_processors` are those that requests may name, as a server's setting has them.
        Up to `speculate` tokens of each request are guessed, which changes no token; "auto": as many as save time.
        """
        guesses = guesses_of_option(speculate)
        processors = load_processors(entries(logit_processors))
        loaded = load_model(model, dtype, device, lambda *_: None, max_length, quantization, kv_dtype=kv_dtype)
        if loaded.clip_tokens:
            processors = {**processors, **rules_processor()}
        if SpeechTokenFiles.read(model) is not None:
            processors = {**processors, **order_processor()}
        capacity = capacity_for(loaded, kv_memory, max_length, max_batch_size, loaded.block_size)
        runner = ModelRunner(loaded, capacity.num_blocks, capacity.block_size, max_rows=capacity.max_rows)
        runner.record(capacity.max_rows, capacity.max_model_len, max_batch_tokens)
        # Costs nothing before the first request that has a grammar.
        fork_server = mask_process.fork_server(str(model), capacity.max_rows)
        masks = Masks(fork_server, capacity.max_rows, loaded.vocab_size, jumps=False)
        return cls(runner, capacity, max_batch_tokens, batch_processors, masks, processors, *guesses)

    def close(self) -> None:
        """End the process that enforces grammars, if there is one. Idempotent."""
        if self._masks is not None:
            self._masks.close()

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Read an adapter, which contexts then name. ValueError gives the reason when it cannot be used."""
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter. ValueError while a request that was not released uses it."""
        handle = self._adapters.handle(name)
        if any(row.adapter == handle for row in self._rows.values()):
            raise ValueError(f"requests use the adapter {name!r}: release them first")
        self._adapters.unload(name)

    @property
    def backend(self) -> str:
        """The kind of backend, in words."""
        return self._runner.description

    @property
    def device(self) -> str:
        return str(self._runner.loaded.device)

    @property
    def max_batch_size(self) -> int:
        """Number of requests that can be held at once."""
        return self._capacity.max_rows

    @property
    def max_length(self) -> int:
        """Number of tokens that one request can have, prompt and answer."""
        return self._capacity.max_model_len

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks."""
        return self._capacity.num_blocks

    def blocks_for(self, context: TextContext) -> int:
        """Return the number of KV blocks that a request holds at its greatest length."""
        longest = self.max_length if context.max_length is None else min(context.max_length, self.max_length)
        return -(-longest // self._capacity.block_size)

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that no request holds."""
        return len(self._free_blocks)

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        """Generate up to `num_steps` tokens for each request; none for one that has ended.

        A context that its caller has chunked takes a chunk in a step, and gets no token for it. ValueError when the
        batch cannot be held (nothing has changed then), or when a request failed (it is cancelled and released then,
        the others keep their new tokens for the next call). A context may bring guesses at its next tokens
        (`SpecDecodingState.draft_tokens_to_verify`): several are verified in one forward pass, and those that held are
        `maybe_accepted_draft_tokens`.
        """
        contexts = inputs.flat_batch
        for context in contexts:
            self._check(context)
        self._check_room([context for context in contexts if not context.is_done], inputs.num_steps)
        self._guesses.begin(contexts)
        self._left = {context.request_id: inputs.num_steps for context in contexts}
        while going := [one for one in contexts if not one.is_done and self._left[one.request_id] > 0]:
            self._advance(going)
        return {context.request_id: context.to_generation_output() for context in contexts}

    def next_token(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        """Do as `execute`, under its older name."""
        return self.execute(inputs)

    def release(self, request_id: RequestID) -> None:
        """Free a request's row and blocks. Idempotent. A context that is used again afterwards is computed anew."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row.index)
            self._free_blocks.extend(row.blocks)
            self._dropped.append(row.index)

    def _check(self, context: TextContext) -> None:
        check_context(context, self.max_length, self._runner.loaded.vocab_size, self._masks is not None)
        self._adapters.handle(context.adapter)
        check_named(self._processors, context.sampling_params.named_processors, f"request {context.request_id}: ")

    def _check_room(self, contexts: Sequence[TextContext], num_steps: int) -> None:
        new = sum(context.request_id not in self._rows for context in contexts)
        free = len(self._free_rows)
        if new > free:
            raise ValueError(
                f"{new} new requests, and {free} of {self.max_batch_size} rows are free: release finished requests, or "
                "load the pipeline with a larger max_batch_size"
            )
        need = sum(self._blocks_short(context, self._length_after(context, num_steps)) for context in contexts)
        free = self.free_blocks
        most = self._capacity.num_blocks
        if need > free:
            raise ValueError(
                f"the batch needs {need} more KV blocks, and {free} of {most} are free: "
                "release finished requests, or load the pipeline with more kv_memory"
            )

    def _length_after(self, context: TextContext, num_steps: int) -> int:
        """Return the most tokens that `num_steps` steps compute: the last sampled one is not among them."""
        most = self.max_length if context.max_length is None else min(context.max_length, self.max_length)
        return max(len(context.tokens), min(len(context.tokens) + num_steps - 1, most - 1))

    def _blocks_short(self, context: TextContext, length: int) -> int:
        row = self._rows.get(context.request_id)
        return max(0, -(-length // self._capacity.block_size) - (len(row.blocks) if row else 0))

    def _advance(self, contexts: Sequence[TextContext]) -> None:
        """Compute one token, or its caller's chunk, for each; more tokens where guesses are right."""
        before = {context.request_id: len(context.tokens) for context in contexts}
        waiting = deque(contexts)
        while waiting:
            batch, joins, cut = self._next_batch(waiting)
            lost = self._step(batch, joins, cut)
            if cut is not None and cut.request_id not in lost:
                waiting.appendleft(cut)
            waiting.extend(lost.values())
        for context in contexts:
            self._left[context.request_id] -= max(1, len(context.tokens) - before[context.request_id])

    def _next_batch(self, waiting: deque[TextContext]) -> tuple[list[TextContext], list[Join], TextContext | None]:
        """Take as many as one forward can hold. The last context may be cut to a chunk for that, and is returned."""
        batch: list[TextContext] = []
        joins: list[Join] = []
        budget = self._max_batch_tokens
        while waiting and budget > 0:
            context = waiting.popleft()
            joins += self._follow(context)
            batch.append(context)
            if context.tokens.active_length > budget and not context.tokens.actively_chunked:
                self._chunk(context, budget)
                return batch, joins, context if context.tokens.actively_chunked else None
            budget -= context.tokens.active_length
        return batch, joins, None

    def _chunk(self, context: TextContext, budget: int) -> None:
        """Leave about `budget` tokens for the next step. More where an image or a prompt must be computed whole."""
        sight = Sight.CAUSAL if self._images is None else self._images.encoder.family.sight
        if sight == Sight.CAUSAL or not isinstance(context, TextAndVisionContext):
            context.tokens.chunk(budget)
        elif sight == Sight.IMAGE:
            context.chunk(budget)

    def _follow(self, context: TextContext) -> list[Join]:
        """Make row and context agree on what is computed. Returns a join if the engine must learn of it."""
        row = self._rows.get(context.request_id)
        tokens = context.tokens
        if row is None:
            adapter = self._adapters.handle(context.adapter)
            row = self._rows[context.request_id] = _Row(self._free_rows.popleft(), adapter=adapter)
        elif row.computed == tokens.processed_length and np.array_equal(row.tokens, tokens.all):
            return []
        processed = tokens.processed_length
        # A recurrent state stands for the tokens that are computed, and cannot go back.
        goes_on = processed == row.computed if self._runner.loaded.recurrent else processed <= row.computed
        if not goes_on or not np.array_equal(row.tokens[:processed], tokens.all[:processed]):
            tokens.rewind_processing(processed)
        self._dropped.append(row.index)
        row.computed = tokens.processed_length
        row.tokens = tokens.all.copy()
        return [
            Join(
                row=row.index,
                tokens=tokens.all.astype(np.int32),
                prompt_len=context.prompt_length,
                start=row.computed,
                sampling=values_of(context),
                grammar=RowGrammar.of(context),
                images=context.images if isinstance(context, TextAndVisionContext) else [],
                adapter=row.adapter,
            )
        ]

    def _step(
        self, batch: Sequence[TextContext], joins: list[Join], cut: TextContext | None
    ) -> dict[RequestID, TextContext]:
        """Compute a batch, of which the context `cut`, if any, is not computed whole. Returns those to compute anew."""
        rows = [self._rows[context.request_id] for context in batch]
        self._steps += 1
        ahead = self._ahead(batch)
        step = Step(
            incarnation=1,
            epoch=0,
            step=self._steps,
            rows=np.array([row.index for row in rows], np.int32),
            ntok=np.array([context.tokens.active_length for context in batch], np.int32),
            new_blocks=self._allocate(batch, ahead),
            drop=np.array(self._dropped, np.int32),
            joins=joins,
            ahead=ahead,
        )
        self._dropped.clear()
        self._logits.sampling = {
            row.index: context for row, context in zip(rows, batch, strict=True) if not context.tokens.actively_chunked
        }
        try:
            result = self._engine.step(step)
        except BaseException:
            self._take_back(batch, cut)
            raise
        again = [] if result.again is None else result.again.tolist()
        lost = {}
        for context, row in zip(batch, rows, strict=True):
            if row.index in again and not (row.index in result.errors and row.failed_alone):
                lost[context.request_id] = context
                row.failed_alone |= row.index in result.errors
        if lost:
            self._take_back(list(lost.values()), cut if cut is not None and cut.request_id in lost else None)
        self._update([context for context in batch if context.request_id not in lost], result)
        return lost

    def _take_back(self, batch: Sequence[TextContext], cut: TextContext | None) -> None:
        """Let a batch whose step has failed be computed by the next call, and the context that was cut for it whole.

        Recurrent states of its rows may have advanced, and cannot go back: those contexts are computed anew.
        """
        if cut is not None and cut.tokens.actively_chunked:
            cut.tokens.set_window(cut.tokens.processed_length, len(cut.tokens), len(cut.tokens))
        if self._runner.loaded.recurrent is None:
            return
        for context in batch:
            row = self._rows[context.request_id]
            row.tokens, row.computed = row.tokens[:0], 0

    def _ahead(self, batch: Sequence[TextContext]) -> NDArray[np.int32] | None:
        """Return how many guesses each may verify in a step, in a pipeline that verifies guesses."""
        if not self._guessing:
            return None
        rows = {self._rows[context.request_id].index: context for context in batch}
        return self._guesses.plan(rows, self._left, self.max_length, self._max_batch_tokens - len(batch))

    def _allocate(self, batch: Sequence[TextContext], ahead: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """Allocate blocks for the tokens that are computed next. Returns `Step.new_blocks`."""
        new = []
        for i, context in enumerate(batch):
            row = self._rows[context.request_id]
            length = context.tokens.current_position + (0 if ahead is None else int(ahead[i]))
            for _ in range(self._blocks_short(context, length)):
                block = self._free_blocks.popleft()
                new.append((row.index, len(row.blocks), block))
                row.blocks.append(block)
        return np.array(new, np.int32).reshape(-1, 3)

    def _update(self, batch: Sequence[TextContext], result: StepResult) -> None:
        logprobs = [None] * len(result.rows) if result.logprobs is None else result.logprobs.tolist()
        sampled = {
            row: (token, logprob)
            for row, token, logprob in zip(result.rows.tolist(), result.tokens.tolist(), logprobs, strict=True)
        }
        reported = {}
        if result.reports is not None:
            reported = {(owner, position): report for owner, position, report in result.reports.entries()}
        following = following_tokens(result)
        failures = []
        for context in batch:
            row = self._rows[context.request_id]
            if row.index in result.errors:
                failures.append(f"request {context.request_id}: {result.errors[row.index]}")
                context.status = GenerationStatus.CANCELLED
                self.release(context.request_id)
                continue
            row.computed = context.tokens.current_position
            if context.tokens.actively_chunked:
                context.tokens.advance_chunk()
                continue
            drawn = [sampled[row.index], *following.get(row.index, [])]
            self._guesses.note(context, [token for token, _ in drawn])
            for i, (token, logprob) in enumerate(drawn):
                if context.is_done:
                    # The engine knows tokens behind the end: the row joins anew if its request goes on.
                    row.tokens = row.tokens[:0]
                    break
                entry = LogProbabilities([logprob], [{token: logprob}]) if wants_logprobs(context) else None
                context.update(token, reported.get((row.index, len(context.tokens)), entry))
                row.tokens = np.append(row.tokens, token)
                row.computed += min(i, 1)
                if not context.is_done and len(context.tokens) >= self.max_length:
                    context.status = GenerationStatus.MAXIMUM_LENGTH
        if failures:
            raise ValueError("; ".join(failures))
