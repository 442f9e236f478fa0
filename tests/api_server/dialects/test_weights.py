"""The routes about weights on the scheduler double: what is refused changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from interfaces import WeightsAction
from interfaces.messages import Action, Order, OrderAnswer, Status, WeightsStatus
from shared.sockets import send_to
from tests.api_server.conftest import LiveServer

HTTP = httpx.Client(timeout=90)


@pytest.mark.parametrize("name", ["", "a\nb", "v" * 257])
def test_a_version_name_that_is_refused_ends_no_request(live: LiveServer, name: str) -> None:
    response = HTTP.post(f"{live.url}/update_weight_version", json={"new_version": name})
    assert response.status_code == 400
    assert live.double.orders == []
    assert HTTP.post(f"{live.url}/update_weight_version", json={"new_version": "v"}).status_code == 200
    assert [order.action for order in live.double.orders] == [Action.ABORT]


@pytest.mark.parametrize("mode", ["abort", "retract", "keep"])
def test_a_sleep_that_is_refused_ends_and_pauses_nothing(live: LiveServer, mode: str) -> None:
    live.double.refuse_weights = "this model takes images"
    response = HTTP.post(f"{live.url}/sleep?mode={mode}")
    assert (response.status_code, "takes images" in response.text) == (400, True)
    assert live.double.orders == []
    live.double.refuse_weights = ""
    assert HTTP.post(f"{live.url}/sleep?level=2&mode={mode}").json() == {"status": "sleeping"}
    assert [order.action for order in live.double.weights_orders] == [WeightsAction.RELEASE] * 2
    assert [order.action for order in live.double.orders] == [Action.ABORT] * (mode == "abort")


def test_a_sleep_that_is_refused_after_a_wait_lets_requests_go_on(live: LiveServer) -> None:
    live.double.refuse_weights = "this model takes images"
    assert HTTP.post(f"{live.url}/sleep?mode=wait").status_code == 400
    assert [order.action for order in live.double.orders] == [Action.DRAIN, Action.PAUSE, Action.CONTINUE]


@pytest.mark.parametrize("offset", [0, -1, 2])
def test_no_model_worker_has_the_rank_of_the_trainer(live: LiveServer, offset: int) -> None:
    """It would listen for the group's members, and could be asked to send."""
    info: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank_offset": offset}
    response = HTTP.post(f"{live.url}/init_weight_transfer_engine", json={"init_info": info})
    assert (response.status_code, "rank_offset" in response.text) == (400, True)
    response = HTTP.post(f"{live.url}/init_weights_update_group", json=info | {"group_name": "g"})
    assert (response.status_code, "rank_offset" in response.text) == (400, True)
    assert live.double.weights_orders == []


def test_a_rank_that_sends_is_none_below_zero(live: LiveServer) -> None:
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "src": -1}
    response = HTTP.post(f"{live.url}/update_weights", json={"update_info": info})
    assert (response.status_code, "src must be" in response.text) == (400, True)
    assert live.double.weights_orders == []


@pytest.mark.parametrize(("refused_at", "status"), [(0, 200), (3, 400)])
def test_a_wait_ends_with_the_requests_or_when_another_operator_ends_it(
    live: LiveServer, refused_at: int, status: int
) -> None:
    orders: list[int] = []

    def obey(router: Any, replica: bytes, order: Order) -> None:
        orders.append(order.action)
        refused = "paused or resumed meanwhile" if len(orders) == refused_at else ""
        requests = int(len(orders) < 3 and order.action != Action.PAUSE)
        send_to(router, replica, OrderAnswer(live.double.incarnation, order.number, refused, requests))

    live.double._obey = obey  # type: ignore[method-assign]
    response = HTTP.post(f"{live.url}/pause?mode=wait")
    assert response.status_code == status
    last = [] if refused_at else [Action.PAUSE]
    assert orders == [Action.DRAIN, Action.DRAIN_ON, Action.DRAIN_ON, *last]


def test_an_answer_without_tokens_names_the_version_that_is_served(live: LiveServer) -> None:
    status = live.double._status

    def updated() -> Status:
        return replace(status(), weights=WeightsStatus(3, "200", "", [], False))

    live.double._status = updated  # type: ignore[method-assign]
    live.double.wait(lambda: HTTP.get(f"{live.url}/weight_version").json() == {"weight_version": "200"})
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 0}}
    assert HTTP.post(f"{live.url}/generate", json=body).json()["meta_info"]["weight_version"] == "200"
    answer = HTTP.post(f"{live.url}/generate", json={"text": "Hello", "sampling_params": {"max_new_tokens": 2}}).json()
    assert answer["meta_info"]["weight_version"] == "default", "the scheduler did not say that another one made them"
