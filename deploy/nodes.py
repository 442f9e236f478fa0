"""The hosts of a group of ranks, as flags and the variables of a LeaderWorkerSet name them.

Knows texts. Does not know processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shared.setting_checks import check
from shared.setting_forms import host_and_port
from shared.settings import Settings, SettingsError

# The flags, and what Kubernetes' LeaderWorkerSet sets in each pod.
_VARIABLES = {"--nodes": "LWS_GROUP_SIZE", "--node": "LWS_WORKER_INDEX", "--rendezvous": "LWS_LEADER_ADDRESS"}
_PORT = 5700


@dataclass(frozen=True)
class Nodes:
    """How many hosts have ranks of one worker, which of them this is, and where the ranks meet, as HOST:PORT."""

    count: int
    own: int
    rendezvous: str

    def ranks(self, settings: Settings) -> range:
        """Return the numbers of this host's ranks, of as many on each host."""
        first = self.own * settings.tensor_parallel
        return range(first, first + settings.tensor_parallel)

    def of_group(self, settings: Settings) -> Settings:
        """Return the settings of the whole group, of one host's. SettingsError for what does not work in groups."""
        ranks = self.count * settings.tensor_parallel
        # On each host there are others of these names; what counts is that there are as many, and all on GPUs.
        gpus = "+".join(f"cuda:{rank}" for rank in range(ranks))
        devices = settings.devices if settings.devices == "cpu" else gpus
        return dataclasses.replace(settings, tensor_parallel=ranks, devices=devices)


def nodes_of(nodes: int | None, node: int | None, rendezvous: str | None, environ: Mapping[str, str]) -> Nodes | None:
    """Return the hosts of a group; None where no flag asks for one. SettingsError names what is missing or wrong."""
    if nodes is None and node is None and rendezvous is None:
        return None
    count = _whole("--nodes", nodes, environ)
    check(count >= 2, "--nodes", count, "2 or more; leave it out for a worker of one host")
    own = _whole("--node", node, environ)
    check(0 <= own < count, "--node", own, f"from 0 to {count - 1}: the hosts of a group count from 0")
    host, port = host_and_port(rendezvous) if rendezvous else ("", _PORT)
    if not host:
        host = environ.get(_VARIABLES["--rendezvous"], "")
        check(bool(host), "--rendezvous", rendezvous or "", "HOST:PORT: there is no LWS_LEADER_ADDRESS here")
    check(1 <= port <= 65535, "--rendezvous", rendezvous, f"HOST:PORT, such as 10.0.0.1:{_PORT}")
    return Nodes(count, own, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _whole(flag: str, given: int | None, environ: Mapping[str, str]) -> int:
    """Return a number that was given, or that of the flag's variable."""
    if given is not None:
        return given
    text = environ.get(_VARIABLES[flag], "")
    if not text.isdecimal():
        raise SettingsError(f"{flag} is missing: give it, or {_VARIABLES[flag]}, which is {text!r}")
    return int(text)
