"""Which network interface of this host leads to another one, so that tensors take the way on which ranks have met."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_GET_ADDRESS = 0x8915
_NAME_BYTES = 16
# Variables of gloo and NCCL that name the interface.
_VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def use_interface_to(address: str, port: int) -> None:
    """Have tensors of ranks go by the interface that leads to an address, unless the operator has named another."""
    if found := interface_of(own_address(address, port)):
        for variable in _VARIABLES:
            os.environ.setdefault(variable, found)


def own_address(address: str, port: int) -> str:
    """Return this host's own address on the way to another one. OSError where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        # Nothing is sent.
        way.connect((address, port))
        return str(way.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty if none has."""
    if ":" in address:
        wanted = ipaddress.ip_address(address).exploded.replace(":", "")
        with contextlib.suppress(OSError):
            lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
            return next((fields[-1] for fields in lines if fields[0] == wanted), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                packed = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[: _NAME_BYTES - 1]))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return ""
