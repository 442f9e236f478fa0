"""The ports of a server: bound once, by the supervisor, and handed down to the API processes.

All of them accept from one queue. So a port belongs to one server from the first moment, a process that is replaced or
dies leaves no connection behind unaccepted, and of two servers that want one port the later one fails at once.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator

from shared.settings import Settings, SettingsError

# Connections that may wait to be accepted; the kernel cuts it to net.core.somaxconn.
BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Open a listening socket. SettingsError names the cause and a remedy: `flag` is the one that gave the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise SettingsError(
            f"host {host!r} is no address of this machine ({error.strerror}); use 127.0.0.1 or 0.0.0.0"
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier server that are only waiting for their end do not stop this one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # which is what settles between two that bind at the same moment
    except OSError as error:
        listener.close()
        raise SettingsError(_explain(error, host, port, flag)) from None
    return listener


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Open the listening sockets of a server, and close them at the end. SettingsError as `listen`."""
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listen(settings.host, settings.port))]
        if settings.ollama_port:
            listeners.append(opened.enter_context(listen(settings.host, settings.ollama_port, "--ollama-port")))
        yield listeners


def close_all(listeners: Iterable[socket.socket]) -> None:
    """Close listening sockets; other processes that have them go on accepting."""
    for listener in listeners:
        listener.close()


def port_problem(host: str, port: int, flag: str = "--port") -> str | None:
    """Explain, with a remedy, why this address cannot be listened on; None when it can."""
    try:
        listen(host, port, flag).close()
    except SettingsError as error:
        return str(error)
    return None


def _explain(error: OSError, host: str, port: int, flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} is taken by another process (`ss -ltnp sport = :{port}` names it); use another {flag}"
        case errno.EACCES:
            return f"port {port} needs privileges, as all below 1024 do; use a {flag} from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"host {host!r} is no address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"cannot listen on {host}:{port}: {error.strerror}"
