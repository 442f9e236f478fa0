"""The optional mechanisms of the CPU backend, each of which a benchmark can switch off to see what it gains.

None of them changes a result. A server has all of them; where one does not pay, the backend leaves it out by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Tuning:
    """Which mechanisms may be used: docs/performance.md says what each gains."""

    # Find the panels of lm_head that can hold the largest logit by an int8 copy (gemm/screened_head.py).
    screened_head: bool = True
    # Read bfloat16 weights from a copy in twelve bits where few tokens are multiplied (simd/bf12.py).
    bf12: bool = True
    # Read cached blocks that rows have in common once for all of them (fused/attention_plan.py).
    cascade_attention: bool = True
    # Launch a greedy step before the tokens of the one before are read (execution/overlap_cpu.py).
    overlap: bool = True

    @staticmethod
    def names() -> list[str]:
        return [field.name for field in fields(Tuning)]

    def without(self, name: str) -> Tuning:
        """Return the same with one mechanism switched off."""
        return replace(self, **{name: False})


# What a server uses.
EVERYTHING = Tuning()
