"""The dispatch policies, simulated: the same batches as the stand-in server's, the same turns, virtual time.

Three policies over one fleet and one list of turns:

    draftmill     the oldest open shard first, over the whole fleet, up to capacity and a short queue at each
                  server; as many shards are open as there are leases
    pinned        each shard on a server of its own, which takes its next shard when the last turn is done
    round_robin   all turns in one list, dealt out strictly in turn; the dealer waits for a full server

Run as a command it prints utilisation against the size of a shard, in multiples of one server's capacity.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))
from standin_server import Batch, Lengths, Pace, Work


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn to generate: sizes in tokens; `following` is the next turn of its conversation."""

    shard: int
    prompt_tokens: int
    output_tokens: int
    following: Turn | None = None

    def chain(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn:
            yield turn
            turn = turn.following


@dataclass(frozen=True)
class Span:
    """One turn as it ran: slot held from `began` to `ended` (seconds) on `server`; `given` when it was sent."""

    server: int
    given: float
    began: float
    ended: float
    output_tokens: int
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a run is judged by. Times in seconds; shares of 1."""

    makespan_s: float
    bound_s: float
    drain_s: float
    longest_turn_s: float
    utilisation: float
    idle_server_s: float


def judge(
    spans: Sequence[Span],
    slots: Sequence[int],
    rates: Sequence[float],
    down: Sequence[tuple[float, float, int]] = (),
) -> Outcome:
    """The figures of a run from its spans, the servers' slots and their full rates (output tokens/s).

    Utilisation is the share of all slot-seconds that were held, from the first request to the final drain, which
    begins when fewer turns are unfinished than the fleet has slots. `down` names the (from, to, server) in which a
    server was dead or starting; these count as idle. Time at which a server runs nothing at all counts as idle too.
    """
    start, end = min(span.given for span in spans), max(span.ended for span in spans)
    ends = sorted(span.ended for span in spans)
    left = sum(slots)
    drain = ends[-left] if left < len(ends) else start
    held = sum(max(0.0, min(span.ended, drain) - span.began) for span in spans)
    idle = 0.0
    for server in range(len(slots)):
        at = start
        for span in sorted((s for s in spans if s.server == server), key=lambda s: s.began):
            idle += max(0.0, span.began - at)
            at = max(at, span.ended)
        idle += max(0.0, end - at)
    lost = sum((min(b, end) - a) * rates[server] for a, b, server in down if a < end)
    return Outcome(
        makespan_s=end - start,
        bound_s=(sum(span.output_tokens for span in spans) + lost) / sum(rates),
        drain_s=end - drain,
        longest_turn_s=max(span.ended - span.given for span in spans),
        utilisation=held / max(1e-9, (drain - start) * sum(slots)),
        idle_server_s=idle,
    )


def full_rate(pace: Pace, turns: Sequence[tuple[int, int]]) -> float:
    """Output tokens/s of a server that always has a queue, on endless repetitions of (prompt, output) tokens."""
    batch, source, done = Batch(pace), itertools.cycle(turns), 0
    for _ in range(pace.slots * 2):
        batch.submit(Work(*next(source)))
    begin = (0.0, 0.0)
    while done < pace.slots * 24:
        for _ in batch.advance(batch.due()):
            done += 1
            batch.submit(Work(*next(source)))
        if done >= pace.slots * 4 and not begin[0]:
            begin = (batch.now, batch.decoded_tokens)
    return (batch.decoded_tokens - begin[1]) / (batch.now - begin[0])


class Policy(Protocol):
    def take(self, server: int) -> Turn | None: ...
    def done(self, turn: Turn) -> None: ...
    def again(self, turn: Turn) -> None: ...


@dataclass
class OldestFirst:
    """Draftmill's policy. `affinity` is left out: the stand-in has no prefix cache."""

    shards: list[deque[Turn]]
    leases: int
    left: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = [sum(len(list(turn.chain())) for turn in shard) for shard in self.shards]
        self.open = list(range(min(self.leases, len(self.shards))))
        self.unopened = deque(range(len(self.open), len(self.shards)))
        for shard in range(len(self.shards)):
            # The longest expected work first: many turns, then long prompts.
            work = sorted(self.shards[shard], key=lambda t: (-len(list(t.chain())), -t.prompt_tokens))
            self.shards[shard] = deque(work)

    def take(self, server: int) -> Turn | None:
        return next((self.shards[shard].popleft() for shard in self.open if self.shards[shard]), None)

    def done(self, turn: Turn) -> None:
        self.left[turn.shard] -= 1
        if turn.following:
            self.shards[turn.shard].appendleft(turn.following)
        if not self.left[turn.shard]:
            self.open.remove(turn.shard)
            if self.unopened:
                self.open.append(self.unopened.popleft())

    def again(self, turn: Turn) -> None:
        self.shards[turn.shard].appendleft(turn)


@dataclass
class Pinned:
    """Each server drains its shard before it takes the next."""

    shards: list[deque[Turn]]
    servers: int

    def __post_init__(self) -> None:
        self.left = [sum(len(list(turn.chain())) for turn in shard) for shard in self.shards]
        self.unopened = deque(range(len(self.shards)))
        self.held: list[int | None] = [None] * self.servers

    def take(self, server: int) -> Turn | None:
        shard = self.held[server]
        if shard is None or not self.left[shard]:
            shard = self.held[server] = self.unopened.popleft() if self.unopened else None
        return self.shards[shard].popleft() if shard is not None and self.shards[shard] else None

    def done(self, turn: Turn) -> None:
        self.left[turn.shard] -= 1
        if turn.following:
            self.shards[turn.shard].appendleft(turn.following)

    def again(self, turn: Turn) -> None:
        self.shards[turn.shard].appendleft(turn)


@dataclass
class RoundRobin:
    """Strictly in turn; a full or dead server blocks the dealer."""

    turns: deque[Turn]
    servers: int
    next_server: int = 0

    def take(self, server: int) -> Turn | None:
        if server != self.next_server or not self.turns:
            return None
        self.next_server = (self.next_server + 1) % self.servers
        return self.turns.popleft()

    def done(self, turn: Turn) -> None:
        if turn.following:
            self.turns.appendleft(turn.following)

    def again(self, turn: Turn) -> None:
        self.turns.appendleft(turn)


def simulate(
    policy: Policy,
    paces: Sequence[Pace],
    turns: int,
    queue: float = 0.25,
    latency_s: float = 0.5,
    death: tuple[int, float, float] | None = None,
) -> list[Span]:
    """Runs all turns; returns their spans in virtual seconds.

    Each server is given up to its slots and `queue` times as many again. An answer's successor arrives `latency_s`
    after it. `death` = (server, at, restart): that server loses everything it holds and is back after `restart`.
    """
    batches = [Batch(pace) for pace in paces]
    permits = [pace.slots + max(2, round(pace.slots * queue)) for pace in paces]
    alive = [True] * len(paces)
    held: list[dict[Work, Turn]] = [{} for _ in paces]
    spans: list[Span] = []
    events: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()
    now = 0.0

    def at(when: float, what: Callable[[], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def give() -> None:
        """Hands out turns until no server takes one."""
        idle = 0
        for server in itertools.cycle(range(len(paces))):
            turn = policy.take(server) if alive[server] and len(held[server]) < permits[server] else None
            if turn:
                work = Work(turn.prompt_tokens, turn.output_tokens)
                held[server][work] = turn
                batches[server].submit(work)
            idle = 0 if turn else idle + 1
            if idle == len(paces):
                return

    def die(server: int, restart: float) -> None:
        alive[server] = False
        for turn in held[server].values():
            policy.again(turn)
        held[server].clear()
        batches[server] = Batch(paces[server], now=now)
        at(now + restart, lambda: revive(server))

    def revive(server: int) -> None:
        alive[server] = True
        batches[server].now = now

    if death:
        at(death[1], lambda: die(death[0], death[2]))
    give()
    while len(spans) < turns:
        now = min([batch.due() for batch in batches] + [event[0] for event in events[:1]])
        for server, batch in enumerate(batches):
            for work in batch.advance(now):
                turn = held[server].pop(work)
                spans.append(Span(server, work.submitted, work.admitted, now, work.output_tokens))
                policy.done(turn)
                at(now + latency_s, give)
        while events and events[0][0] <= now:
            heapq.heappop(events)[2]()
            if not events or events[0][0] > now:
                give()
    return spans


def make_turns(
    count: int, shards: int, seed: int, lengths: Lengths, chain: int = 1, prompt: int = 200
) -> list[deque[Turn]]:
    """`count` turns in conversations of `chain` turns each, over `shards` shards; lengths drawn from the seed."""
    draw, length = random.Random(seed), lengths.sampler()
    made: list[deque[Turn]] = [deque() for _ in range(shards)]
    for number in range(count // chain):
        turn: Turn | None = None
        shard = number % shards
        for _ in range(chain):
            turn = Turn(
                shard, max(1, round(draw.lognormvariate(0, 0.4) * prompt)), length(draw.gauss(0, 1)), turn
            )
        assert turn
        made[shard].append(turn)
    return made


def compare(
    paces: Sequence[Pace],
    turns: int,
    shards: int,
    seed: int = 0,
    chain: int = 1,
    death: tuple[int, float, float] | None = None,
    leases: int | None = None,
) -> dict[str, Outcome]:
    """The three policies on the same work; `leases`: shards that ours has at work at once, by default one a server."""
    lengths = Lengths()

    def work() -> list[deque[Turn]]:
        return make_turns(turns, shards, seed, lengths, chain)

    sizes = [(t.prompt_tokens, t.output_tokens) for shard in work() for first in shard for t in first.chain()]
    rates = [full_rate(pace, sizes) for pace in paces]
    down = [(death[1], death[1] + death[2], death[0])] if death else []
    policies: dict[str, Policy] = {
        "draftmill": OldestFirst(work(), leases=leases or len(paces)),
        "pinned": Pinned(work(), len(paces)),
        "round_robin": RoundRobin(
            deque(t for shard in zip(*work(), strict=False) for t in shard), len(paces)
        ),
    }
    results = {}
    for name, policy in policies.items():
        count = len(sizes)
        if isinstance(policy, RoundRobin):
            count = sum(len(list(t.chain())) for t in policy.turns)
        results[name] = judge(
            simulate(policy, paces, count, death=death), [p.slots for p in paces], rates, down
        )
    return results


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--servers", type=int, default=8)
    arguments.add_argument("--slots", type=int, default=44)
    arguments.add_argument("--turns-per-slot", type=int, default=40)
    asked = arguments.parse_args()
    fleet = [Pace(asked.slots)] * asked.servers
    slow = [*fleet[1:], Pace(asked.slots, speed=0.25)]
    total = asked.servers * asked.slots * asked.turns_per_slot
    print(
        f"{'fleet':8} {'shard/capacity':>14} {'shards':>6} {'policy':12} {'util':>6} {'makespan/(bound+drain)':>22} {'drain/longest':>13}"
    )
    for name, paces in (("equal", fleet), ("one slow", slow)):
        for multiple in (1, 2, 3, 4, 5, 8, asked.turns_per_slot):
            shards = max(1, total // (multiple * asked.slots))
            for policy, got in compare(paces, total, shards).items():
                over = got.makespan_s / (got.bound_s + got.drain_s)
                print(
                    f"{name:8} {multiple:14} {shards:6} {policy:12} {got.utilisation:6.3f} {over:22.3f}"
                    f" {got.drain_s / got.longest_turn_s:13.2f}"
                )


if __name__ == "__main__":
    main()
