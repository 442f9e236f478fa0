"""ZeroMQ over TCP: encrypted and authenticated by CURVE keys, for peers on an allow-list only.

A folder of keys, made by `tokenyard keys`, has on the serving side `server.key_secret` and `peers/NAME.key` for each
peer that may come, and on a peer's side `peer.key_secret` and `server.key`. The files are pyzmq's certificates. A
stranger does not get past the handshake: no byte of it reaches a process, and it gets no answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from shared.settings import SettingsError

SERVER = "server"
PEER = "peer"
PEERS = "peers"
_DOMAIN = "tokenyard"


def make_server_keys(folder: Path) -> None:
    """Make the server's keys. SettingsError when the folder has keys already: a new pair would lock every peer out."""
    if (folder / f"{SERVER}.key_secret").exists():
        raise SettingsError(f"{folder} has server keys already; name another folder, or add a peer with --peer NAME")
    (folder / PEERS).mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    _make_pair(folder, SERVER)


def make_peer_keys(folder: Path, name: str) -> Path:
    """Put a peer on the allow-list. Returns the folder to be carried to its machine."""
    carried = folder / name
    listed = folder / PEERS / f"{name}.key"
    if not (folder / f"{SERVER}.key").exists():
        raise SettingsError(f"{folder} has no server keys; make them first: tokenyard keys {folder}")
    if not name.replace("-", "").replace("_", "").isalnum() or name == PEERS or carried.exists() or listed.exists():
        raise SettingsError(f"peer {name!r} must be a new name of letters, digits, - and _ in {folder}")
    carried.mkdir(mode=0o700)
    _make_pair(carried, PEER)
    (carried / f"{SERVER}.key").write_bytes((folder / f"{SERVER}.key").read_bytes())
    (carried / f"{PEER}.key").rename(listed)
    return carried


def bind_secure(router: zmq.Socket[bytes], endpoint: str, folder: Path) -> ThreadAuthenticator:
    """Lets the ROUTER listen at a tcp endpoint, too, for the peers of `folder`. `stop` the result at the end.

    Options hold for what is bound after them: an ipc endpoint that is bound already stays as it is.
    """
    public, secret = _pair(folder / f"{SERVER}.key_secret")
    guard = ThreadAuthenticator(router.context)
    guard.start()
    guard.configure_curve(domain=_DOMAIN, location=str(folder / PEERS))
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_PUBLICKEY, public)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret)
    router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without this, libzmq lets every peer with the server's public key in when no authenticator answers.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        guard.stop()
        raise SettingsError(f"worker_endpoint {endpoint!r} cannot be bound: {error}") from None
    return guard


def secure_connection(dealer: Any, folder: Path) -> None:
    """Set the CURVE options of a socket, so that its next `connect` is a peer's."""
    public, secret = _pair(folder / f"{PEER}.key_secret")
    server, _ = _load(folder / f"{SERVER}.key")
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server)


def check_server_keys(folder: Path) -> None:
    """Check the serving side's folder. SettingsError names what is missing, or what others can read."""
    _pair(folder / f"{SERVER}.key_secret")
    if not any((folder / PEERS).glob("*.key")):
        raise SettingsError(
            f"{folder} lists no peer, so no worker could connect; add one: tokenyard keys {folder} --peer NAME"
        )


def check_peer_keys(folder: Path) -> None:
    """Check a peer's folder. SettingsError names what is missing, or what others can read."""
    _pair(folder / f"{PEER}.key_secret")
    _load(folder / f"{SERVER}.key")


def _make_pair(folder: Path, name: str) -> None:
    before = os.umask(0o077)
    try:
        create_certificates(folder, name)
    finally:
        os.umask(before)


def _pair(file: Path) -> tuple[bytes, bytes]:
    public, secret = _load(file)
    if secret is None:
        raise SettingsError(f"{file} has no secret key; make new ones with `tokenyard keys`")
    if file.stat().st_mode & 0o077:
        raise SettingsError(f"{file} can be read by others; take that right away: chmod 600 {file}")
    return public, secret


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(file)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} cannot be read: {error}; make keys with `tokenyard keys`") from None
