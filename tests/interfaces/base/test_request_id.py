"""Request ids are strings in every respect; requests are whatever has one."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from pydantic import BaseModel, ValidationError

from interfaces.base.request_id import DUMMY_REQUEST_ID, Request, RequestID
from interfaces.wire.codec import msgpack_numpy_decoder, msgpack_numpy_encoder


def test_a_fresh_id_is_unique_and_plain() -> None:
    one, two = RequestID(), RequestID()
    assert one != two
    assert re.fullmatch("[0-9a-f]{32}", one)
    assert type(one.value) is type(str(one)) is str


def test_it_is_its_string() -> None:
    name = RequestID("a")
    assert name == "a"
    by_name: dict[str, int] = {name: 1}
    assert by_name["a"] == 1
    assert f"{name}" == "a"
    assert repr(name) == "RequestID('a')"
    for copied in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert (copied, type(copied)) == (name, RequestID)


def test_it_travels_as_a_string() -> None:
    wire = msgpack_numpy_encoder()({RequestID("a"): RequestID("b")})
    assert wire == msgpack_numpy_encoder()({"a": "b"})
    ((key, value),) = msgpack_numpy_decoder(dict[RequestID, RequestID])(wire).items()
    assert type(key) is type(value) is RequestID


def test_pydantic_makes_it_of_strings_only() -> None:
    class Model(BaseModel):
        name: RequestID

    assert type(Model.model_validate({"name": "x"}).name) is RequestID
    with pytest.raises(ValidationError):
        Model.model_validate({"name": 5})


def test_a_request_is_what_has_an_id() -> None:
    class Other:
        request_id = RequestID("x")

    assert isinstance(Other(), Request)
    assert isinstance(Request(DUMMY_REQUEST_ID), Request)
    assert not isinstance(object(), Request)
    assert str(Request(RequestID("x"))) == "x"
