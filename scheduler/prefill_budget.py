"""How many tokens of prompts a step may compute beside rows in decode, so that these keep their rhythm.

A step takes as long as everything in it, and every row in decode waits for its end. A single prompt therefore gets
three fifths of the time that the rows in decode need anyway, so a stream beside it keeps more than half its speed. Long
prompts share that time, up to one prompt for every few rows. Beyond, their time grows with their number, because each
of them is waited for as a row is. Several short prompts are not limited: the sooner they decode beside the others, the
sooner all are done. Where no row decodes, steps are as large as the operator allows.

Knows times and counts of one worker's recent steps, not whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence

# Minimum prefill tokens in a step, so that even a slow prompt makes progress.
MIN_PREFILL_TOKENS = 8
# Time that a prompt may add to a step, as a share of the decode time. Step times vary by 25 %; 0.6 keeps the p99 of
# inter-token latencies under 2.5 times the median.
PREFILL_SHARE = 0.6
# Rows in decode that one long prompt counts as, when several prompts share the time.
ROWS_OF_A_PROMPT = 4
# Steps with prompts after which the rows in decode get one step to themselves, to measure their time.
STEPS_BETWEEN_MEASUREMENTS = 12
# A step that is to be short may still take this many times as long as the shortest one.
SHORT_STEPS = 2.0
# Weight of a new time among those before it.
_WEIGHT = 0.1
# The same after a long time without a measurement. A longer time has half of it, because it may have other causes.
_WEIGHT_ANEW = 0.8
# A time beyond this multiple of the expected one counts as that multiple: another process had the machine.
_OUTLIER = 2.0


class PrefillBudget:
    """Seconds of decode steps by the number of rows (in powers of two), and seconds of a prompt's token.

    Both grow with the contexts, and the time of a step that has both does not say which grew. Rows in decode therefore
    get a step to themselves now and then. Without it, rows that are slower than believed would make a prompt's tokens
    seem slow, and the budget would shrink with every step.
    """

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._token: float | None = None
        # Steps with prompts since rows in decode had one to themselves, by their number (in powers of two).
        self._mixed: dict[int, int] = {}
        # Numbers of rows whose next step to themselves has more weight.
        self._doubtful: set[int] = set()

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with `decoding` rows in decode and `prompt_tokens` tokens of prompts."""
        size = decoding.bit_length()
        if not prompt_tokens:
            known = self._decode.get(size)
            weight = _WEIGHT
            if size in self._doubtful:
                weight = _WEIGHT_ANEW if known is None or seconds < known else _WEIGHT_ANEW / 2
                self._doubtful.remove(size)
            self._decode[size] = _averaged(known, seconds, weight)
            self._mixed[size] = 0
            return
        self._mixed[size] = self._mixed.get(size, STEPS_BETWEEN_MEASUREMENTS) + 1
        decode = self._decode_seconds(decoding) or 0.0
        if not decoding or decode:
            self._token = _averaged(self._token, max(seconds - decode, 0.1 * seconds) / prompt_tokens)

    @property
    def token_seconds(self) -> float | None:
        """The measured time of a prompt's token; None while none is known."""
        return self._token

    def block_seconds(self, block_size: int) -> float | None:
        """The measured time of so many tokens of a prompt; None while none is known."""
        return None if self._token is None else self._token * block_size

    def prompt_tokens(self, decoding: int, left: Sequence[int], step_tokens: int) -> int | None:
        """The most tokens of prompts beside `decoding` rows in decode; None for no limit.

        0 if the rows in decode get this step to themselves. `left` has the tokens that each prompt still needs, of
        which a step may compute `step_tokens` at most.
        """
        decode = self._decode_seconds(decoding)
        if decode is None or self._token is None:
            return None
        if len(left) > 1 and sum(left) <= len(left) * step_tokens:
            return None
        size = decoding.bit_length()
        if self._mixed.get(size, STEPS_BETWEEN_MEASUREMENTS) >= STEPS_BETWEEN_MEASUREMENTS:
            self._mixed[size] = 0  # further steps begin before this one's result is here, and need not measure again
            self._doubtful.add(size)
            return 0
        share = PREFILL_SHARE * max(1.0, ROWS_OF_A_PROMPT * len(left) / decoding) if len(left) > 1 else PREFILL_SHARE
        return max(MIN_PREFILL_TOKENS, int(share * decode / self._token))

    def seconds_beside(self, decoding: int) -> float | None:
        """The time that a batch of texts may take between two steps of `decoding` rows; None while none is known."""
        decode = self._decode_seconds(decoding)
        return None if decode is None else PREFILL_SHARE * decode

    def knows(self, decoding: int) -> bool:
        """Whether the time of about so many rows in decode was measured, or is none."""
        return not decoding or decoding.bit_length() in self._decode

    def rows_within(self, seconds: float) -> int | None:
        """The most rows in decode whose step takes about `seconds`, as far as known; None for no limit.

        Where the shortest known step is longer than half of that, twice its time is allowed.
        """
        allowed = self._at_least(seconds)
        fitting = max((size for size, known in self._decode.items() if known <= allowed), default=0)
        longer = [size for size in self._decode if size > fitting]
        return (1 << (min(longer) - 1)) - 1 if longer and fitting else None

    def tokens_within(self, seconds: float, share: float = 1.0) -> int | None:
        """The most tokens of prompts that take about a `share` of `seconds`, allowed as above; None for no limit."""
        if self._token is None:
            return None
        return max(MIN_PREFILL_TOKENS, int(share * self._at_least(seconds) / self._token))

    def _at_least(self, seconds: float) -> float:
        return max(seconds, SHORT_STEPS * min(self._decode.values(), default=0.0))

    def _decode_seconds(self, decoding: int) -> float | None:
        """Seconds of a step of `decoding` rows alone, by the nearest number of rows that was measured."""
        if not decoding or not self._decode:
            return None
        size = decoding.bit_length()
        return self._decode[min(self._decode, key=lambda known: abs(known - size))]


def _averaged(known: float | None, seen: float, weight: float = _WEIGHT) -> float:
    """The moving average `known` after another value; a first value is taken as it is."""
    return seen if known is None else known + weight * (min(seen, _OUTLIER * known) - known)
