"""The meeting points of one server's processes: files and ipc sockets inside one private run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# sun_path of a Unix socket holds 108 bytes with its terminator (unix(7)).
_LONGEST_SOCKET_PATH = 107
# Name of the folder of adapters that came over HTTP.
UPLOADS = "uploaded_adapters"
# Name of the folder of tensors that came over HTTP or a group.
UPLOADED_WEIGHTS = "uploaded_weights"


_LOCAL_WORKER = b"worker:"


def worker_identity(index: int, epoch: int, pid: int) -> bytes:
    """The name on its socket of a worker that is a process of the scheduler's machine."""
    return f"worker:{index}:{epoch}:{pid}".encode()


def remote_identity(name: str) -> bytes:
    """The name on its socket of a worker of another machine, which has no index yet."""
    return f"remote:{name}".encode()


def is_local_worker(identity: bytes) -> bool:
    """Whether a name is that of a process of this machine. A peer chooses its own, so the socket must be this one's."""
    return identity.startswith(_LOCAL_WORKER)


@dataclass(frozen=True)
class RunDirectory:
    """The 0700 directory that one supervisor owns and removes at the end."""

    path: Path

    def __post_init__(self) -> None:
        for endpoint in (self.api_endpoint, self.worker_endpoint):
            if len(endpoint.removeprefix("ipc://")) > _LONGEST_SOCKET_PATH:
                raise ValueError(
                    f"run directory {self.path} is too long for a socket path; set TMPDIR to a shorter one"
                )

    @property
    def api_endpoint(self) -> str:
        """The endpoint for API replicas, bound by the scheduler."""
        return f"ipc://{self.path}/api.sock"

    @property
    def worker_endpoint(self) -> str:
        """The endpoint for workers, bound by the scheduler."""
        return f"ipc://{self.path}/workers.sock"

    def keeper_socket(self, index: int) -> Path:
        """The socket of the keeper of a worker's weights. No longer than those above, for fewer than 1000 workers."""
        return self.path / f"keep{index}.sock"

    def of_further_model(self, index: int) -> RunDirectory:
        """The run directory of the scheduler and the workers of a further model, counted from 0."""
        return RunDirectory(self.path / f"also{index}")

    def of_further_models(self) -> list[RunDirectory]:
        """Those run directories of further models that exist."""
        return [RunDirectory(path) for path in sorted(self.path.glob("also[0-9]*"))]

    @property
    def settings_file(self) -> Path:
        return self.path / "settings.json"

    @property
    def image_key_file(self) -> Path:
        """The secret with which API processes make the hashes of images."""
        return self.path / "image.key"

    @property
    def doors(self) -> Path:
        """The folder of the locks that say which API processes have the listening sockets."""
        return self.path / "doors"

    @property
    def accounts_file(self) -> Path:
        """The book of what each key uses; API processes share it."""
        return self.path / "accounts.db"

    @property
    def adapters_file(self) -> Path:
        """The adapters that were loaded; the scheduler writes it, and reads it when it was restarted."""
        return self.path / "adapters.json"

    @property
    def uploaded_adapters(self) -> Path:
        """The folder of adapters that came over HTTP; API processes write them, and the scheduler removes them."""
        return self.path / UPLOADS

    @property
    def painted_images(self) -> Path:
        """The folder of images that clients fetch by URL; API processes write and remove them."""
        return self.path / "painted_images"

    @property
    def weights_file(self) -> Path:
        """The version of the weights that is served; the scheduler writes it, and workers that start read it."""
        return self.path / "weights.json"

    @property
    def uploaded_weights(self) -> Path:
        """The folder of tensors that were sent: API processes and workers write them, the scheduler removes them."""
        return self.path / UPLOADED_WEIGHTS

    @property
    def index_file(self) -> Path:
        """The index that a scheduler on another machine has given the worker of this directory."""
        return self.path / "index"

    @property
    def deaths_file(self) -> Path:
        """The log of process deaths, newest last, with their causes; the supervisor writes it."""
        return self.path / "deaths.log"

    def stack_file(self, name: str) -> Path:
        """The file into which a stuck process writes its stack; `name` is the supervisor's for it."""
        return self.path / f"{name.replace(':', '-')}.stack"

    @property
    def processes_file(self) -> Path:
        """The table of silent processes; the supervisor writes it (shared/process_table.py)."""
        return self.path / "processes.json"

    @property
    def live_directory(self) -> Path:
        """The folder in which API replicas keep their live figures."""
        return self.path / "live"

    @property
    def metrics_directory(self) -> Path:
        """The folder in which API replicas keep their counters (prometheus_client's multiprocess files)."""
        return self.path / "metrics"
