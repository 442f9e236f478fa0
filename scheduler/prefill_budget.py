"""How many tokens of prompts a step may compute beside rows in decode, so that these keep their rhythm.

A step takes as long as everything in it, and every row in decode waits for its end. So a single prompt gets three
fifths of the time that the rows in decode need anyway: whoever reads along sees more than half the speed, never a
standstill. Long ones together get the same, until there is more than one for every few rows; from there on their time
grows with their number, because each is waited for as a row is. Several short ones are another matter: the sooner they
decode beside the others the sooner everybody is done. Then, and where nothing decodes, steps are as large as the
operator allows.

Knows times and counts of one worker's recent steps. Does not know whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_PREFILL_TOKENS = 8
"""Of prompts in a step, however slow they are: they must come to an end."""
PREFILL_SHARE = 0.6
"""Of the time of rows in decode, for a prompt. Steps differ by a quarter: so few take 2.5 times what they did."""
ROWS_OF_A_PROMPT = 4
"""Rows in decode that one long prompt counts as, when time is shared out among more than one."""
STEPS_BETWEEN_MEASUREMENTS = 12
"""Beside rows in decode after which a prompt leaves out a step, unless these rows had one to themselves meanwhile."""
_WEIGHT = 0.1
_WEIGHT_ANEW = 0.8
"""Of a time that was not measured for long. A longer one counts for half of that: something else may have been why."""
_OUTLIER = 2.0
"""A time beyond so many times what was expected counts as that: something else had the machine."""


class PrefillBudget:
    """Seconds of decode steps by the number of rows (in powers of two), and seconds of a prompt's token.

    Both grow with contexts, and of a step that has both nobody can tell which did. So rows in decode have a step to
    themselves now and then: were they thought faster than they are, a prompt's few tokens would seem to take what they
    do, and get fewer with every step.
    """

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._token: float | None = None
        self._mixed: dict[int, int] = {}
        """Steps with prompts since so many rows (in powers of two) had one to themselves."""
        self._doubtful: set[int] = set()
        """Numbers of rows whose next step to themselves says more than those before."""

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step with so many rows in decode and tokens of prompts took so long."""
        size = decoding.bit_length()
        if not prompt_tokens:
            known, weight = self._decode.get(size), _WEIGHT
            if size in self._doubtful:
                weight = _WEIGHT_ANEW if known is None or seconds < known else _WEIGHT_ANEW / 2
                self._doubtful.remove(size)
            self._decode[size], self._mixed[size] = _followed(known, seconds, weight), 0
            return
        self._mixed[size] = self._mixed.get(size, STEPS_BETWEEN_MEASUREMENTS) + 1
        alone = self._alone(decoding) or 0.0
        if not decoding or alone:
            self._token = _followed(self._token, max(seconds - alone, 0.1 * seconds) / prompt_tokens)

    def prompt_tokens(self, decoding: int, left: Sequence[int], step_tokens: int) -> int | None:
        """The most tokens of prompts beside so many rows in decode; None where nothing speaks for a limit, and 0 where
        these rows are to be measured alone.

        `left` are the tokens that each prompt still has, of which a step may compute `step_tokens` at most.
        """
        alone = self._alone(decoding)
        if alone is None or self._token is None:
            return None
        if len(left) > 1 and sum(left) <= len(left) * step_tokens:
            return None
        size = decoding.bit_length()
        if self._mixed.get(size, STEPS_BETWEEN_MEASUREMENTS) >= STEPS_BETWEEN_MEASUREMENTS:
            self._mixed[size] = 0  # steps are begun before the results of earlier ones come: one measure is enough
            self._doubtful.add(size)
            return 0
        share = PREFILL_SHARE * max(1.0, ROWS_OF_A_PROMPT * len(left) / decoding) if len(left) > 1 else PREFILL_SHARE
        return max(MIN_PREFILL_TOKENS, int(share * alone / self._token))

    def _alone(self, decoding: int) -> float | None:
        """What a step of so many rows in decode takes, by the nearest number of rows that is known."""
        if not decoding or not self._decode:
            return None
        size = decoding.bit_length()
        return self._decode[min(self._decode, key=lambda known: abs(known - size))]


def _followed(known: float | None, seen: float, weight: float = _WEIGHT) -> float:
    return seen if known is None else known + weight * (min(seen, _OUTLIER * known) - known)
