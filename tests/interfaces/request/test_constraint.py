"""A constraint is a value: equal by content, and not to be changed once it was made."""

from __future__ import annotations

import dataclasses

import pytest

from interfaces import Constraint, ConstraintKind


def test_equal_by_value_and_frozen() -> None:
    made = Constraint(ConstraintKind.REGEX, "a+", begins_after="</think>", field="regex")
    assert made == dataclasses.replace(made)
    assert made != dataclasses.replace(made, begins_after="")
    assert len({made, dataclasses.replace(made)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.source = "b"  # type: ignore[misc]
