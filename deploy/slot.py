"""A place in the supervisor's list: the child that fills it now, and how its predecessors fared."""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.child import Child, ChildSpec


@dataclass(frozen=True)
class RestartPolicy:
    """When a dead child is started again, in seconds, and when no more.

    The delay doubles from `first_delay` to `longest_delay` and falls back after the child served for `settled_after`. A
    child is hopeless after `deaths` deaths in a row, each before it had served that long. The supervisor gives up when
    all children of a role are; until then the others go on, and the hopeless one is tried again and again.
    """

    first_delay: float = 0.25
    longest_delay: float = 8.0
    settled_after: float = 10.0
    deaths: int = 5


@dataclass(eq=False)
class Slot:
    """One of the children of a server, across its deaths and restarts."""

    spec: ChildSpec
    policy: RestartPolicy
    child: Child | None = None
    # The fork server of the child that has died, which can fork the next one.
    parent: Child | None = None
    epoch: int = field(init=False)
    # Whether a child that ends is followed by another.
    wanted: bool = True
    due: float = 0.0
    deaths_in_a_row: int = 0
    # Set while the child leaves, because another one has taken its place or a member of its group has died: its end is
    # no death.
    kill_at: float | None = None
    # The seconds that the child has for leaving.
    patience: float = 0.0

    def __post_init__(self) -> None:
        self.epoch = self.spec.first_epoch

    def record_death(self, ready_at: float | None, now: float) -> None:
        """Record a death: of this child, or of one in its group. `ready_at` is when the last of them began to serve."""
        served = 0.0 if ready_at is None else now - ready_at
        self.deaths_in_a_row = 1 if served >= self.policy.settled_after else self.deaths_in_a_row + 1
        self.due = now + self.delay

    def wait_for_others(self, now: float) -> None:
        """Record that this child, or one in its group, ended because others were not there: that is no death."""
        self.due = now + self.policy.longest_delay

    def let_end(self, now: float, patience: float) -> None:
        """Record that the child is leaving; after `patience` seconds it is killed."""
        self.kill_at = now + patience
        self.patience = patience

    @property
    def hopeless(self) -> bool:
        return self.deaths_in_a_row >= self.policy.deaths and (not self.serves or self.leaves)

    @property
    def leaves(self) -> bool:
        return self.child is not None and self.kill_at is not None

    @property
    def delay(self) -> float:
        doublings = min(self.deaths_in_a_row - 1, 32)
        return float(min(self.policy.longest_delay, self.policy.first_delay * 2**doublings))

    @property
    def serves(self) -> bool:
        return self.child is not None and self.child.ready_at is not None
