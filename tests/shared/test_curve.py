"""TCP between machines: peers on the allow-list get through, strangers get nothing."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from interfaces.messages import Goodbye, Inquiry
from interfaces.wire.codec import decode, encode
from shared.curve import PeerList, bind_secure, check_server_keys, make_peer_keys, make_server_keys
from shared.settings import SettingsError
from shared.sockets import bind_router, connect_dealer, send_to
from tests.system.server import free_port

QUIET_MS = 700


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_server_keys(tmp_path / "keys")
    make_peer_keys(tmp_path / "keys", "box")
    return tmp_path / "keys"


@pytest.fixture
def served(context: zmq.Context[Any], keys: Path, tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    router = bind_router(context, f"ipc://{tmp_path}/s.sock")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    guard = bind_secure(router, endpoint, keys)
    yield router, endpoint
    router.close(linger=0)
    guard.stop()


def test_a_listed_peer_talks_and_so_does_one_on_this_machine(
    context: zmq.Context[Any], served: tuple[zmq.Socket[bytes], str], keys: Path, tmp_path: Path
) -> None:
    router, endpoint = served
    remote = connect_dealer(context, endpoint, b"remote", keys / "box")
    local = connect_dealer(context, f"ipc://{tmp_path}/s.sock", b"local")
    for dealer, name in ((remote, b"remote"), (local, b"local")):
        dealer.send(encode(Inquiry(name.decode())))
        assert router.poll(5000)
        identity, frame = router.recv_multipart()
        assert (identity, decode(frame)) == (name, Inquiry(name.decode()))
        assert send_to(router, name, Goodbye("x"))
        assert dealer.poll(5000)
        assert decode(dealer.recv()) == Goodbye("x")


def _plain(folder: Path) -> list[bytes]:
    """A stranger that does not know of CURVE."""
    return []


def _own_keys(folder: Path) -> list[bytes]:
    """A stranger that knows the server's public key and has made itself a pair."""
    return [*zmq.curve_keypair(), zmq.auth.load_certificate(folder / "server.key")[0]]


def _struck_off(folder: Path) -> list[bytes]:
    """A peer of another server, or one that was taken off the list: its keys are good, but not here."""
    other = folder.parent / "other"
    make_server_keys(other)
    public, secret = zmq.auth.load_certificate(make_peer_keys(other, "box") / "peer.key_secret")
    assert secret is not None
    return [public, secret, zmq.auth.load_certificate(folder / "server.key")[0]]


# A process of its own, as strangers have one: libzmq has been seen to wait for ever for the end of a context in which a
# connection was still being refused.
STRANGER = """
import os, sys, zmq
endpoint, hello, *keys = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, b"worker:0:0:1")
for option, key in zip((zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY, zmq.CURVE_SERVERKEY), keys):
    socket.setsockopt(option, bytes.fromhex(key))
socket.connect(endpoint)
for _ in range(20):
    socket.send(bytes.fromhex(hello))
print("sent", flush=True)
sys.stdin.readline()
print("answered" if socket.poll(100) else "silent", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("disguise", [_plain, _own_keys, _struck_off])
def test_a_stranger_gets_nothing(
    context: zmq.Context[Any], served: tuple[zmq.Socket[bytes], str], keys: Path, disguise: Any
) -> None:
    router, endpoint = served
    given = [encode(Inquiry("let me in")), *disguise(keys)]
    command = [sys.executable, "-c", STRANGER, endpoint, *(part.hex() for part in given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "sent\n"
        assert not router.poll(QUIET_MS), "a stranger's message arrived"
        assert not send_to(router, b"worker:0:0:1", Goodbye("x"))
        stranger.stdin.write("\n")
        stranger.stdin.flush()
        assert stranger.stdout.readline() == "silent\n", "a stranger was answered"
    friend = connect_dealer(context, endpoint, b"friend", keys / "box")
    friend.send(encode(Inquiry("friend")))
    assert router.poll(5000)
    assert router.recv_multipart()[0] == b"friend"


def test_noise_on_the_port_does_no_harm(
    context: zmq.Context[Any], served: tuple[zmq.Socket[bytes], str], keys: Path
) -> None:
    router, endpoint = served
    port = int(endpoint.rpartition(":")[2])
    for size in (0, 1, 10, 64, 1000, 100_000):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as noise:
            try:
                noise.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE"[: size % 12] + secrets.token_bytes(size))
                noise.settimeout(0.3)
                heard = b"".join(iter(lambda: noise.recv(4096), b""))
            except OSError:
                heard = b""
            # ZMTP's public greeting is all that is said before a peer has proved itself.
            assert len(heard) <= 128
    friend = connect_dealer(context, endpoint, b"friend", keys / "box")
    friend.send(encode(Inquiry("friend")))
    assert router.poll(5000)
    assert router.recv_multipart()[0] == b"friend"


def test_tcp_without_keys_is_refused(context: zmq.Context[Any]) -> None:
    with pytest.raises(ValueError, match="without CURVE keys"):
        connect_dealer(context, "tcp://127.0.0.1:5600", b"x")


def test_keys_are_private_and_never_overwritten(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    assert (keys / "server.key_secret").stat().st_mode & 0o777 == 0o600
    assert (keys / "box" / "peer.key_secret").stat().st_mode & 0o777 == 0o600
    assert not (keys / "box" / "peer.key").exists()
    with pytest.raises(SettingsError, match="has server keys already"):
        make_server_keys(keys)
    for name in ("box", "../x", "", "peers", "a b"):
        with pytest.raises(SettingsError, match="must be a new name"):
            make_peer_keys(keys, name)


def test_a_folder_that_cannot_work_is_explained(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="tokenyard keys"):
        check_server_keys(tmp_path / "nothing")
    check_server_keys(keys)
    (keys / "server.key_secret").chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        check_server_keys(keys)
    (keys / "server.key_secret").chmod(0o600)
    (keys / "peers" / "box.key").unlink()
    with pytest.raises(SettingsError, match="lists no peer"):
        check_server_keys(keys)


def test_the_allow_list_is_read_at_the_start(
    context: zmq.Context[Any], served: tuple[zmq.Socket[bytes], str], keys: Path
) -> None:
    router, endpoint = served
    late = connect_dealer(context, endpoint, b"late", make_peer_keys(keys, "late"))
    late.send(encode(Inquiry("late")))
    started = time.monotonic()
    assert not router.poll(QUIET_MS)
    assert time.monotonic() - started >= QUIET_MS / 1000 - 0.05


def test_a_peer_that_is_listed_later_comes_in_without_a_restart(context: zmq.Context[Any], keys: Path) -> None:
    router = bind_router(context, f"ipc://{keys.parent}/late.sock")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    peers = bind_secure(router, endpoint, keys)
    try:
        carried = make_peer_keys(keys, "late")
        early = connect_dealer(context, endpoint, b"early", carried)
        early.send(encode(Inquiry("early")))
        assert not router.poll(QUIET_MS), "the list is as it was read"
        assert peers.refresh()
        assert not peers.refresh(), "nothing has changed since"
        late = connect_dealer(context, endpoint, b"late", carried)
        late.send(encode(Inquiry("late")))
        assert router.poll(5000)
        assert decode(router.recv_multipart()[1]) in (Inquiry("late"), Inquiry("early"))
    finally:
        router.close(linger=0)
        peers.stop()


def test_a_removed_peer_stays_out_whatever_the_other_files_are(
    context: zmq.Context[Any], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = keys / "peers"
    other = make_peer_keys(keys, "other")
    removed = zmq.auth.load_certificate(keys / "box" / "peer.key_secret")[0]
    left = zmq.auth.load_certificate(other / "peer.key_secret")[0]
    peers = PeerList(context, keys)
    try:
        assert peers.callback("", removed)
        for text in ("", "public-key", 'public-key = "abc"'):
            (folder / "half.key").write_text(text)
            peers.refresh()
            assert peers.callback("", removed)
        (folder / "gone.key").symlink_to(folder / "nothing")
        (folder / "box.key").unlink()
        assert peers.refresh()
        assert not peers.callback("", removed)
        assert peers.callback("", left)
        assert not peers.refresh()
        assert caplog.text.count("half.key cannot be read") == 1
        made = zmq.curve_keypair()[0]
        (folder / "half.key").write_text(f'public-key = "{made.decode()}"')
        assert peers.refresh()
        assert peers.callback("", made)
    finally:
        peers.stop()
