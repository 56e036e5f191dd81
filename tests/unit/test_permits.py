"""Permits: never more than the limit, oldest first, and alone means alone, whatever crosses on the way."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from draftmill.fleet.permits import Client, Permits


def permits(limit: int, **wants: int) -> Permits:
    """Clients named a, b, c …, the oldest first."""
    return Permits(
        limit, {name: Client((float(at), name), want=n) for at, (name, n) in enumerate(wants.items())}
    )


def test_the_oldest_gets_all_it_wants_and_the_next_what_is_left() -> None:
    assert permits(10, a=7, b=7, c=7).grants() == [("a", 7), ("b", 3)]


def test_nothing_is_granted_twice() -> None:
    server = permits(10, a=4)
    assert server.grants() == [("a", 4)]
    assert server.grants() == []
    assert server.held == 4 and server.wanted == 0


def test_what_comes_back_goes_to_the_oldest_again() -> None:
    server = permits(4, old=4, young=4)
    server.grants()
    server.clients["old"].returned += 2
    server.clients["old"].want, server.clients["old"].seen = 2, 4
    assert server.grants() == [("old", 2)]


def test_the_start_of_the_lease_decides_and_not_its_name() -> None:
    server = Permits(1, {1: Client((6.0, "a"), want=1), 2: Client((5.0, "b"), want=1)})
    assert server.grants() == [(2, 1)]


def test_leases_of_one_moment_go_by_name() -> None:
    server = Permits(1, {1: Client((5.0, "b"), want=1), 2: Client((5.0, "a"), want=1)})
    assert server.grants() == [(2, 1)]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_server_that_is_down_grants_nothing(limit: int) -> None:
    server = permits(limit, a=3)
    server.clients["a"].alone = True
    assert server.grants() == []


def test_a_want_counted_before_the_last_grant_is_not_served_twice() -> None:
    """The client said "5" when it had seen none; 3 are on their way to it."""
    server = permits(3, a=5)
    assert server.grants() == [("a", 3)]
    server.limit = 10
    assert server.grants() == [("a", 2)]


def test_a_gone_clients_permits_come_back() -> None:
    server = permits(3, a=3, b=3)
    server.grants()
    del server.clients["a"]
    assert server.grants() == [("b", 3)]


def test_a_dead_server_holds_nothing_and_late_returns_change_nothing() -> None:
    server = permits(3, a=3)
    server.grants()
    server.forget_held()
    client = server.clients["a"]
    assert server.held == 0
    client.want, client.seen = 3, 3
    assert server.grants() == [("a", 3)]
    # the client has given back two of the first start's since; as the supervisor takes such a count
    client.returned += max(0, 2 - client.returned)
    assert server.held == 3


class TestAlone:
    def test_the_server_empties_first(self) -> None:
        server = permits(4, a=2, b=1, c=4)
        server.clients["b"].alone = True
        assert server.grants() == [("a", 2)]
        server.clients["a"].returned = 1
        assert server.grants() == []
        server.clients["a"].returned = 2
        assert server.grants() == [("b", 1)]
        assert server.grants() == []

    def test_one_turn_however_many_are_wanted(self) -> None:
        server = permits(4, a=3)
        server.clients["a"].alone = True
        assert server.grants() == [("a", 1)]
        assert server.grants() == []

    def test_nobody_joins_a_turn_that_runs_alone_not_even_an_older_client(self) -> None:
        server = permits(4, old=0, suspect=1, young=4)
        server.clients["suspect"].alone = True
        assert server.grants() == [("suspect", 1)]
        server.clients["old"].want = 3
        server.clients["suspect"].want, server.clients["suspect"].seen = 0, 1
        assert server.grants() == []
        server.clients["suspect"].alone = False  # it may say so before the turn is back
        assert server.grants() == []
        server.clients["suspect"].returned = 1
        assert server.grants() == [("old", 3), ("young", 1)]

    def test_a_gone_suspect_blocks_nobody(self) -> None:
        server = permits(4, suspect=1, young=4)
        server.clients["suspect"].alone = True
        server.grants()
        del server.clients["suspect"]
        assert server.grants() == [("young", 4)]

    def test_a_dead_server_is_not_taken_by_the_turn_that_ran_alone(self) -> None:
        server = permits(4, suspect=1, young=4)
        server.clients["suspect"].alone = True
        server.grants()
        server.forget_held()
        server.clients["suspect"].alone = False
        assert server.grants() == [("young", 4)]


# --- with messages on their way


@dataclass
class _Sender:
    """A client of the fleet, as fleet/client.py counts: it says what it wants, sees grants, gives back."""

    name: int
    turns: int = 0
    alone: bool = False
    seen: int = 0
    returned: int = 0
    running: int = 0
    running_alone: int = 0
    inbox: deque[tuple[int, bool]] = field(default_factory=deque)  # permits, granted as alone
    outbox: deque[tuple[int, int, int, bool]] = field(default_factory=deque)


class Crossing(stateful.RuleBasedStateMachine):
    """Messages of both sides lie in queues and are delivered late, each queue in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Permits()
        self.senders: dict[int, _Sender] = {}

    def sent(self, grants: Iterable[tuple[object, int]]) -> None:
        """Checks a round of grants and puts it on its way."""
        clients = self.server.clients
        given = [(int(str(name)), number) for name, number in grants]
        assert given == sorted(given), "older ones first"
        for name, number in given:
            assert number > 0
            if not clients[name].alone:
                older = [clients[other] for other in range(name) if other in clients]
                assert all(client.open_want == 0 for client in older), "an older client still wants"
            self.senders[name].inbox.append((number, clients[name].alone))

    @stateful.initialize(limit=st.integers(1, 6), clients=st.integers(1, 4))
    def begin(self, limit: int, clients: int) -> None:
        self.server.limit = limit
        for name in range(clients):
            self.senders[name] = _Sender(name)
            self.server.clients[name] = Client((float(name), ""))

    def choose(self, data: st.DataObject) -> _Sender:
        return self.senders[data.draw(st.sampled_from(sorted(self.senders)))]

    def say(self, sender: _Sender) -> None:
        want = min(1, sender.turns) if sender.alone else sender.turns
        if sender.alone and sender.running:
            want = 0
        sender.outbox.append((want, sender.seen, sender.returned, sender.alone))

    @stateful.precondition(lambda self: self.senders)
    @stateful.rule(data=st.data(), turns=st.integers(0, 8), alone=st.booleans())
    def wants(self, data: st.DataObject, turns: int, alone: bool) -> None:
        sender = self.choose(data)
        sender.turns = turns
        if not sender.running:
            sender.alone = alone
        self.say(sender)

    @stateful.precondition(lambda self: any(s.outbox for s in self.senders.values()))
    @stateful.rule(data=st.data())
    def the_server_hears(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.senders.items() if s.outbox]))
        want, seen, returned, alone = self.senders[name].outbox.popleft()
        client = self.server.clients[name]
        client.want, client.seen, client.alone = want, seen, alone
        client.returned += max(0, returned - client.returned)
        self.sent(self.server.grants())

    @stateful.precondition(lambda self: any(s.inbox for s in self.senders.values()))
    @stateful.rule(data=st.data())
    def a_client_sees_a_grant(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.senders.items() if s.inbox]))
        sender = self.senders[name]
        number, alone = sender.inbox.popleft()
        sender.seen += number
        used = min(number, sender.turns) if alone == sender.alone else 0
        sender.turns -= used
        sender.running += used
        sender.running_alone += used if alone else 0
        sender.returned += number - used
        self.say(sender)

    @stateful.precondition(lambda self: any(s.running for s in self.senders.values()))
    @stateful.rule(data=st.data())
    def a_turn_is_answered(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.senders.items() if s.running]))
        sender = self.senders[name]
        sender.running -= 1
        sender.running_alone = 0
        sender.returned += 1
        self.say(sender)

    @stateful.precondition(lambda self: len(self.senders) > 1)
    @stateful.rule(data=st.data())
    def a_client_is_killed(self, data: st.DataObject) -> None:
        """Its turns may still run on the server for a moment; what counts here is that its permits are free."""
        sender = self.choose(data)
        del self.senders[sender.name], self.server.clients[sender.name]
        self.sent(self.server.grants())

    @stateful.invariant()
    def never_more_than_the_limit(self) -> None:
        assert (
            sum(sender.running for sender in self.senders.values()) <= self.server.held <= self.server.limit
        )
        assert all(client.held >= 0 for client in self.server.clients.values())

    @stateful.invariant()
    def alone_means_alone(self) -> None:
        if any(sender.running_alone for sender in self.senders.values()):
            assert sum(sender.running for sender in self.senders.values()) == 1

    def teardown(self) -> None:
        """When all that is on its way has arrived, whoever wants turns gets them one after the other."""
        for sender in self.senders.values():
            sender.alone = False
            self.say(sender)
        for _ in range(2000):
            if not any(s.inbox or s.outbox or s.running or s.turns for s in self.senders.values()):
                return
            for sender in list(self.senders.values()):
                while sender.outbox:
                    want, seen, returned, alone = sender.outbox.popleft()
                    client = self.server.clients[sender.name]
                    client.want, client.seen, client.alone = want, seen, alone
                    client.returned += max(0, returned - client.returned)
                    self.sent(self.server.grants())
                while sender.inbox:
                    number, alone = sender.inbox.popleft()
                    sender.seen += number
                    used = min(number, sender.turns) if not alone else 0
                    sender.turns -= used
                    sender.returned += number - used + used  # answered at once
                    self.say(sender)
                sender.returned += sender.running
                if sender.running:
                    sender.running = sender.running_alone = 0
                    self.say(sender)
        raise AssertionError(f"turns are left waiting: {self.senders} {self.server}")


TestCrossing = Crossing.TestCase
TestCrossing.settings = hypothesis.settings(max_examples=100, stateful_step_count=40)
