"""ZeroMQ over TCP: encrypted and authenticated by CURVE keys, for peers on an allow-list only.

A folder of keys, made by `tokenyard keys`, has on the serving side `server.key_secret` and `peers/NAME.key` for each
peer that may come, and on a peer's side `peer.key_secret` and `server.key`. The files are pyzmq's certificates. A
stranger does not get past the handshake: no byte of it reaches a process, and it gets no answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from shared.settings import SettingsError

log = logging.getLogger(__name__)

SERVER = "server"
PEER = "peer"
PEERS = "peers"
_DOMAIN = "tokenyard"
# Length of a key in the text of a file.
_KEY_LENGTH = 40

# Milliseconds between ZeroMQ's heartbeats of an idle connection, and without an answer until it is closed. ZeroMQ's own
# thread sends and answers them, so a busy process is no silent one.
_HEARTBEAT_MS = 1000
_SILENCE_MS = 4000
# Milliseconds that an attempt to connect, or a handshake, may take. The kernel alone would try for minutes.
_CONNECT_MS = 2000
# Seconds without traffic until the kernel asks whether the peer's host is there, between its questions, and their
# number: the second line behind the heartbeats.
_KEEPALIVE = (5, 2, 3)


class PeerList:
    """Lets the peers of a folder in, and no others. `stop` ends it, once the sockets that ask it are closed."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self._folder = folder / PEERS
        self._known: dict[str, int] = {}
        # The files that could not be read, each with the reason.
        self._broken: dict[str, str] = {}
        # Replaced as a whole: the authenticator's thread reads it.
        self._allowed: frozenset[bytes] = frozenset()
        self.refresh()
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key may come; the authenticator asks."""
        return key in self._allowed

    def refresh(self) -> bool:
        """Read the folder again if its files have changed. Returns whether the list is another one.

        A file that cannot be read lets no peer in, and changes nothing for the others.
        """
        listed = self._listed()
        if listed == self._known and not self._broken:
            return False
        allowed = set()
        broken = {}
        for name in listed:
            try:
                allowed.add(_public_key(self._folder / name))
            except (OSError, ValueError) as error:
                broken[name] = str(error)
        for name in broken.keys() - self._broken.keys():
            log.warning("%s cannot be read, so its peer may not connect: %s", self._folder / name, broken[name])
        changed = allowed != self._allowed
        self._known = listed
        self._broken = broken
        self._allowed = frozenset(allowed)
        return changed

    def stop(self) -> None:
        self._guard.stop()

    def _listed(self) -> dict[str, int]:
        listed = {}
        # A file may go between the two calls, and an editor replaces it.
        with contextlib.suppress(OSError):
            for path in self._folder.glob("*.key"):
                with contextlib.suppress(OSError):
                    listed[path.name] = path.stat().st_mtime_ns
        return listed


def _public_key(file: Path) -> bytes:
    """The public key in a file. OSError or ValueError where it has none, as one that is half written."""
    try:
        public, _ = load_certificate(file)
    except LookupError:
        public = b""
    if len(public) != _KEY_LENGTH:
        raise ValueError("it has no whole public key")
    return public


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


def watch_connection(socket: Any) -> None:
    """Have a silent peer noticed in seconds, on connections that are made after this.

    For tcp only: on one machine the kernel closes the connection of a process that ends.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _SILENCE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_MS)
    idle, interval, count = _KEEPALIVE
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)


def bind_secure(router: zmq.Socket[bytes], endpoint: str, folder: Path) -> PeerList:
    """Lets the ROUTER listen at a tcp endpoint for the peers of `folder`. `stop` the result at the end.

    Options hold for what is bound after them: an ipc endpoint that is bound already stays as it is. A peer chooses the
    name under which it comes, so a ROUTER that takes names for proofs has no other endpoint.
    """
    secure_server(router, folder)
    watch_connection(router)
    guard = PeerList(router.context, folder)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        guard.stop()
        raise SettingsError(f"worker_endpoint {endpoint!r} cannot be bound: {error}") from None
    return guard


def secure_server(socket: Any, folder: Path) -> None:
    """Have the socket take only listed peers at endpoints that it binds from now on. A `PeerList` must be there."""
    _serve_with(socket, folder / f"{SERVER}.key_secret")


def _serve_with(socket: Any, file: Path) -> None:
    public, secret = _pair(file)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without this, libzmq lets every peer with the server's public key in when no authenticator answers.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_connection(dealer: Any, folder: Path) -> None:
    """Set the CURVE options of a socket, so that its next `connect` is a peer's."""
    public, secret = _pair(folder / f"{PEER}.key_secret")
    server, _ = _load(folder / f"{SERVER}.key")
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
    watch_connection(dealer)


class Equals:
    """Lets those in who have the keys of this peer, and no others. `stop` ends it, once the sockets are closed."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self._public, _ = _pair(folder / f"{PEER}.key_secret")
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key may come; the authenticator asks."""
        return key == self._public

    def stop(self) -> None:
        self._guard.stop()


def bind_among_equals(router: zmq.Socket[bytes], endpoint: str, folder: Path) -> None:
    """Let a socket listen for those who have the same peer's keys. `Equals` must be there. ZMQError if it cannot."""
    _serve_with(router, folder / f"{PEER}.key_secret")
    watch_connection(router)
    router.bind(endpoint)


def connect_among_equals(dealer: zmq.Socket[bytes], endpoint: str, folder: Path) -> None:
    """Connect to a socket of one who has the same peer's keys."""
    public, secret = _pair(folder / f"{PEER}.key_secret")
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, public)
    watch_connection(dealer)
    dealer.connect(endpoint)


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
