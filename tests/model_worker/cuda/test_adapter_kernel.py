"""What adapters' kernels add to rows, interpreted: beside plain float64, and the same bits for a row in any company."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model_worker.cuda.interpreter import need_triton

need_triton()

from model_worker.cuda.adapter_kernel import FIELDS, UNIT, add_low_rank, add_vectors  # noqa: E402

# Of each slot. The last one has no factors for this module.
KINDS = ({"rank": 1}, {"rank": 16}, {"rank": 5, "gain": True}, {"rank": 35, "gain": True, "shift": True}, {"rank": 0})
WIDEST = 64


class Slots:
    """Random factors of some slots, and what they make of rows in float64."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.base = torch.zeros(UNIT, dtype=dtype)
        self.factors = [
            {
                "a": torch.randn(max(1, kind["rank"]), inputs).to(dtype),
                "b": torch.randn(max(1, kind["rank"]), outputs).to(dtype),
                "scale": float(np.float32(np.random.default_rng().uniform(0.1, 2))),
                **{name: torch.randn(outputs) for name in ("gain", "shift") if name in kind},
            }
            for kind in KINDS
        ]
        self.table = torch.zeros(len(KINDS), FIELDS, dtype=torch.int64)
        for row, one, kind in zip(self.table, self.factors, KINDS, strict=True):
            places = [(one[name].data_ptr() - self.base.data_ptr()) // UNIT for name in "ab"]
            (bits,) = struct.unpack("<i", struct.pack("<f", one["scale"]))
            behind = [one[name].data_ptr() if name in one else 0 for name in ("gain", "shift")]
            row.copy_(torch.tensor([*places, kind["rank"], bits, *behind]))

    def changed(self, y: Tensor, inner: Tensor, slot: int) -> Tensor:
        one = self.factors[slot]
        sums = y.double() + one["scale"] * inner @ one["b"].double()
        changed: Tensor = sums * one.get("gain", torch.ones(1)).double() + one.get("shift", torch.zeros(1)).double()
        return changed

    def add(self, x: Tensor, y: Tensor, column: list[int]) -> Tensor:
        result = y.clone()
        add_low_rank(result, x, self.base, self.table, torch.tensor(column, dtype=torch.int32), WIDEST)
        return result


def segments(lengths: list[int]) -> list[int]:
    """Slots of requests of these lengths, of which some have none."""
    slots = np.random.default_rng().integers(-1, len(KINDS), len(lengths))
    return np.repeat(slots, lengths).tolist()


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype", "lengths"),
    [
        (8, 5, torch.float32, [1, 1, 2, 1, 4]),
        (300, 130, torch.float16, [1, 9, 1, 1, 20]),
        (1100, 40, torch.float32, [1, 60, 1, 65, 5]),
    ],
)
def test_rows_become_what_their_slots_make_of_them(
    inputs: int, outputs: int, dtype: torch.dtype, lengths: list[int]
) -> None:
    slots = Slots(inputs, outputs, dtype)
    # Each slot is there, and rows without one.
    column = [*segments(lengths), *range(-1, len(KINDS)), 3, 3]
    x, y = torch.randn(len(column), inputs).to(dtype), torch.randn(len(column), outputs).to(dtype)
    got = slots.add(x, y, column)
    for row, slot in enumerate(column):
        if slot < 0 or not KINDS[slot]["rank"]:
            assert torch.equal(got[row], y[row]), "rows of the base model keep their bits"
            continue
        want = slots.changed(y[row], x[row].double() @ slots.factors[slot]["a"].double().T, slot)
        # Half precision rounds what is between the factors, too, as PEFT does.
        error = 1e-5 if dtype == torch.float32 else 2e-3
        assert (got[row].double() - want).norm() < error * (want.norm() + inputs**0.5)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count products of tiles, and let the interpreter sum each element in the same order: numpy's library does not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    count = [0]

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> object:
        count[0] += 1
        found = (a.data[:, :, None].astype(np.float32) * b.data[None]).sum(1, np.float32)
        return TensorHandle(found + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    return count


@pytest.mark.usefixtures("products")
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Alone, in a step of few rows at any place, and in one of so many that programs take several slots and pieces."""
    inputs, outputs = 1100, 20
    slots = Slots(inputs, outputs, torch.float32)
    own = [2, 1, -1, 3]
    x, y = torch.randn(len(own), inputs), torch.randn(len(own), outputs)
    alone = torch.cat([slots.add(x[[row]], y[[row]], [slot]) for row, slot in enumerate(own)])
    for before, behind in (([1] * 7, [2, 1]), ([3, 0, *[1] * 13], [1, 2, *[-1] * 120])):
        column = [*before, *own, *behind]
        all_x, all_y = torch.randn(len(column), inputs), torch.randn(len(column), outputs)
        place = slice(len(before), len(before) + len(own))
        all_x[place], all_y[place] = x, y
        assert torch.equal(slots.add(all_x, all_y, column)[place], alone)


def test_rows_of_one_slot_beside_each_other_share_its_factors(products: list[int]) -> None:
    """Factors of other slots are not read, nor those of a slot more than once for a tile of 16 rows."""
    slots = Slots(64, 40, torch.float32)
    counts = []
    for column in ([1] * 140, [1] * 72 + [-1] * 68, [1, 0] * 70, [-1] * 140):
        before = products[0]
        slots.add(torch.randn(140, 64), torch.randn(140, 40), column)
        counts.append(products[0] - before)
    # One for A and one for B of each slot in each of nine tiles.
    assert counts == [9 * 2, 5 * 2, 9 * 4, 0]


def test_vectors_of_tokens_are_changed_by_their_slots() -> None:
    slots = Slots(1, 40, torch.float32)
    for row, one, kind in zip(slots.table, slots.factors, KINDS, strict=True):
        one["a"] = torch.randn(50, max(1, kind["rank"]))
        row[0] = (one["a"].data_ptr() - slots.base.data_ptr()) // UNIT
    column = [0, 3, -1, 1, 4, 2, 3]
    tokens = torch.randint(50, (len(column),))
    y = torch.randn(len(column), 40)
    got = y.clone()
    add_vectors(got, tokens, slots.base, slots.table, torch.tensor(column, dtype=torch.int32), WIDEST)
    for row, slot in enumerate(column):
        if slot < 0 or not KINDS[slot]["rank"]:
            assert torch.equal(got[row], y[row])
        else:
            want = slots.changed(y[row], slots.factors[slot]["a"][tokens[row]].double(), slot)
            torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-4)
