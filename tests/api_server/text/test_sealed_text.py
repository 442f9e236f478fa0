"""What a server has sealed comes back, from any of its replicas, and from nobody else."""

from __future__ import annotations

import base64
import random

import pytest

from api_server.text.sealed_text import Seal
from tests.api_server.conftest import CORPUS


@pytest.mark.parametrize("text", ["", "hm", "Größe 😀\u2028\n\0", random.choice(CORPUS) * 100])
def test_a_text_comes_back(text: str) -> None:
    sealed = Seal("model").sealed(text)
    assert Seal("model").opened(sealed) == text
    assert Seal("another").opened(sealed) is None
    assert sealed.isascii()


def test_nothing_else_is_opened() -> None:
    seal = Seal("model")
    packed = bytearray(base64.urlsafe_b64decode(seal.sealed("a thought")))
    for i in range(len(packed)):
        changed = packed.copy()
        changed[i] ^= 1
        assert seal.opened(base64.urlsafe_b64encode(changed).decode()) is None
    for foreign in ("", "gAAA", "x" * 1001, "é", "!!!!", base64.b64encode(b"ty1").decode()):
        assert seal.opened(foreign) is None
