"""Turns one answer's tokens into text: detokenizes, finds stop strings, parses the text, sets the finish reason.

Knows neither the scheduler nor other answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from api_server.answers.choice import Choice, Finish, TextDelta, TokenDelta
from api_server.answers.reader import AnswerReader
from api_server.parsers.answer import text_of
from api_server.parsers.scanner import Piece
from api_server.state import ServerState
from api_server.text.stops import Stops
from interfaces import GenerationStatus, LogProbabilities, TextContext, TextGenerationOutput

# Looking up a member in an enum costs more than comparing with it.
_GOES_ON = GenerationStatus.ACTIVE


class Answer:
    """Turns one choice's tokens into text: detokenizes, finds stop strings, sets the finish reason.

    A `reader` splits the text into reasoning, text and tool calls.
    """

    def __init__(self, choice: Choice, server: ServerState, reader: AnswerReader | None) -> None:
        request = choice.request
        tokenizer = server.tokenizer
        context: list[int] = choice.prompt_token_ids[-16:].tolist()
        self.choice = choice
        # Guesses of the submissions before the one that runs.
        self.guesses_before = (0, 0)
        self._reader = reader
        self._closing = server.formats.closing if request.max_thinking_tokens is not None else []
        self._text = tokenizer.detokenizer(context, request.skip_special_tokens, server.formats.kept(request))
        self._details = tokenizer.detokenizer(context, False) if request.token_details else None
        self._is_special = tokenizer.is_special
        self._stops = Stops(choice.sampling.stop or [], request.stop_patterns, request.keep_stop)
        self._parsed = reader is not None and request.parse_answer
        if reader is not None and self._parsed:
            reader.stops = self._stops
        self._min_tokens = choice.sampling.min_new_tokens

    def absorb(self, output: TextGenerationOutput) -> TextDelta:
        choice = self.choice
        if choice.only_scores:
            ended = output.final_status is not GenerationStatus.ACTIVE
            cancelled = output.final_status is GenerationStatus.CANCELLED
            choice.cached_tokens = output.num_cached_tokens or choice.cached_tokens
            return TextDelta(choice.index, "", 0, [], Finish("cancelled" if cancelled else "length") if ended else None)
        before = choice.completion_tokens
        pieces: list[str] = []
        i = -1
        last = len(output.tokens) - 1
        at_stop_token = output.final_status is GenerationStatus.END_OF_SEQUENCE
        logprobs = output.log_probabilities
        for i, token in enumerate(output.tokens):
            choice.completion_tokens += 1
            report = logprobs[i] if logprobs and i < len(logprobs) else None
            if report is not None:
                choice.logprob_sum += report.token_log_probabilities[0]
            if self._details is not None:
                choice.tokens.append(self._detail(self._details.add(token), token, report))
            hidden = at_stop_token and i == last and not choice.request.keep_stop
            # As with EOS and stop ids, stop strings count only after the minimum length.
            self._stops.active = choice.completion_tokens > self._min_tokens
            pieces.append("" if hidden else self._seen(self._text.add(token)))
            if self._reader is not None:
                self._reader.add(token, pieces[-1])
                if self._reader.enough or self.reasoning_budget_reached:
                    break
            if self._stops.exist and self._stops.matched is not None:
                break
        if not before:
            choice.cached_tokens = output.num_cached_tokens or choice.cached_tokens
        goes_on = self.reasoning_budget_reached and output.final_status is not GenerationStatus.CANCELLED
        finish = None if goes_on else self._end(output.final_status, pieces)
        parts = self._taken(self._reader)
        text = text_of(parts) if self._parsed else "".join(pieces)
        choice.pieces.append(text)
        return TextDelta(choice.index, text, choice.completion_tokens - before, choice.tokens[before:], finish, parts)

    @property
    def may_end_itself(self) -> bool:
        """True when the answer's text may end the answer before its tokens do."""
        return self._reader is not None or self._stops.exist

    @property
    def reasoning_budget_reached(self) -> bool:
        """True when reasoning is to be ended from outside, and there is room for its closing tokens."""
        if self._reader is None or not self._reader.exhausted or not self._closing:
            return False
        longest = self.choice.context.max_length
        length = self.choice.prompt_tokens + self.choice.completion_tokens + len(self._closing)
        return longest is None or length < longest

    def guesses_with(self, guesses: tuple[int, int]) -> tuple[int, int]:
        """Guesses at the whole answer, and those that were right, by those of the submission that runs."""
        computed, right = self.guesses_before
        return computed + guesses[0], right + guesses[1]

    def go_on(self) -> TextContext:
        """The context with closing tokens of reasoning in place of the tokens after the last one read."""
        context = self.choice.context
        context.drop_last_tokens(len(context.tokens) - self.choice.prompt_tokens - self.choice.completion_tokens)
        context.status = GenerationStatus.ACTIVE
        closing = self._closing
        self._closing = []
        for token in closing:
            # A forced token has probability 1.
            context.receive_token(token, LogProbabilities([0.0], [{}]) if context.log_probabilities else None)
        return context

    def _taken(self, reader: AnswerReader | None) -> Sequence[Piece]:
        """The pieces of a delta."""
        if reader is None:
            return ()
        self.choice.reasoning_tokens = reader.reasoning_tokens
        return reader.take()

    def _seen(self, piece: str) -> str:
        """Passes new text through the stops and returns the visible part. With a reader, the reader feeds the stops."""
        return piece if self._parsed else self._stops.add(piece)

    def _detail(self, text: str, token: int, report: LogProbabilities | None) -> TokenDelta:
        special = self._is_special(token)
        if report is None:
            return TokenDelta(token, text, None, special, {}, {})
        asked = report.asked_log_probabilities
        return TokenDelta(
            token,
            text,
            report.token_log_probabilities[0],
            special,
            report.top_log_probabilities[0],
            asked[0] if asked else {},
        )

    def _end(self, status: GenerationStatus, pieces: list[str]) -> Finish | None:
        """The finish reason, or None. Held-back text is added to the pieces, and given to the reader."""
        if status is _GOES_ON and self._reader is None and not self._stops.exist:
            return None
        enough = self._reader is not None and self._reader.enough
        ends = status.is_done or enough or self._stops.matched is not None
        if ends and self._stops.matched is None and not enough:
            pieces.append(self._seen(self._text.flush()))
            if self._reader is not None:
                self._reader.feed(pieces[-1])
        if ends and self._reader is not None:
            self._reader.finish(cut=status is not GenerationStatus.END_OF_SEQUENCE)
        if ends and not self._parsed:
            pieces.append(self._stops.flush())
        if enough:
            return Finish("stop_token")
        if self._stops.matched is not None:
            return Finish("stop_string", self._stops.matched)
        if not status.is_done:
            return None
        if status is GenerationStatus.END_OF_SEQUENCE:
            return Finish("stop_token", self.choice.token_ids[-1] if self.choice.completion_tokens else None)
        return Finish("length" if status is GenerationStatus.MAXIMUM_LENGTH else "cancelled")
