"""Waking the thread that waits for sockets."""

from __future__ import annotations

import select
from threading import Thread

from model_worker.wake_up import WakeUp


def is_awake(wake_up: WakeUp, seconds: float = 0) -> bool:
    return bool(select.select([wake_up], [], [], seconds)[0])


def test_it_is_readable_from_a_wake_until_it_is_cleared() -> None:
    wake_up = WakeUp()
    assert not is_awake(wake_up)
    wake_up.clear()
    thread = Thread(target=wake_up.wake)
    thread.start()
    assert is_awake(wake_up, 60)
    thread.join()
    wake_up.clear()
    assert not is_awake(wake_up)
    wake_up.wake()
    assert is_awake(wake_up)


def test_nobody_waits_however_often_it_is_woken() -> None:
    wake_up = WakeUp()
    for _ in range(100_000):
        wake_up.wake()
    while is_awake(wake_up):
        wake_up.clear()
    wake_up.wake()
    assert is_awake(wake_up)
