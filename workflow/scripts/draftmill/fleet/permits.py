"""Who may send the next turn to one server. Pure: it counts, and knows no socket and no clock.

The oldest lease comes first, always: that keeps a fleet busy through the end of every shard, since a
draining shard's free places go to the next one at once (simulated and measured: docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Client:
    """What one client has said and got. All counts but ``want`` only ever grow, so that a message that
    crossed another on its way means the same."""

    order: tuple[float, str]  # (start of its lease, name): smaller goes first
    want: int = 0  # turns it would send at once, counted when it had seen ``seen`` permits
    seen: int = 0
    alone: bool = False  # it wants one permit while nobody else has any
    runs_alone: bool = False  # its last permit was such a one
    granted: int = 0
    returned: int = 0

    @property
    def held(self) -> int:
        return self.granted - self.returned

    @property
    def open_want(self) -> int:
        return max(0, self.want - (self.granted - self.seen))


@dataclass
class Permits:
    """The permits of one server: at most ``limit`` at a time, none while it is 0."""

    limit: int = 0
    clients: dict[Hashable, Client] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(client.held for client in self.clients.values())

    @property
    def wanted(self) -> int:
        return sum(client.open_want for client in self.clients.values())

    def grants(self) -> list[tuple[Hashable, int]]:
        """Gives out what can be given, and says to whom how many."""
        given: list[tuple[Hashable, int]] = []
        if any(client.runs_alone and client.held for client in self.clients.values()):
            return given
        for name, client in sorted(self.clients.items(), key=lambda item: item[1].order):
            free = self.limit - self.held
            if client.alone and self.limit > 0:
                if client.open_want == 0:
                    break  # it is about to say what it wants
                if self.held > 0:
                    break  # the server empties first
                free = 1
            number = min(free, client.open_want)
            if number > 0:
                client.granted += number
                client.runs_alone = client.alone
                given.append((name, number))
            if client.alone and self.limit > 0:
                break
        return given

    def forget_held(self) -> None:
        """The server is gone, and with it everything that ran on it."""
        for client in self.clients.values():
            client.returned = client.granted
