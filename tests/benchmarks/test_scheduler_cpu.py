"""The CPU time of a scheduler for a token is measured under a load that never ends."""

from __future__ import annotations

from benchmarks.scheduler_cpu import Stage


def test_all_rows_stay_in_use_and_each_step_of_a_worker_has_its_tokens() -> None:
    stage = Stage(workers=2, rows=4, answer=6)
    turns = [stage.turn() for _ in range(200)]
    assert all(spent > 0 for spent, _ in turns)
    # A prompt fits into one step, which samples its first token: so each step has a token of each row.
    assert [tokens for _, tokens in turns] == [4] * 200
