import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.progress import (
    Event,
    Left,
    ServerNow,
    fleet_trouble,
    latest_part,
    left_said,
    line,
    prometheus,
    roughly,
    server_now,
    shard_now,
    summary,
    time_left,
)
from draftmill.records import Server
from draftmill.telemetry import Sample

T = 1_790_000_000.0
SERVER = Server("h/s0", "h", "s0", "", "sglang", "0.5.23", (), ("GPU-0",), "NVIDIA H200", None, 10, 0, ())


def client(
    shard: str, start: float, end: float, *, turns: int = 1000, reused: int = 0, per_s: float = 1.0
) -> list[Event]:
    """A client that settles `per_s` turns of 100 tokens a second and says so every 30 s."""
    events: list[Event] = [{"t": start, "shard": shard, "event": "started", "turns": turns, "reused": reused}]
    t = start + 30
    while t <= end:
        made = int((t - start) * per_s)
        events.append(
            {
                "t": t,
                "shard": shard,
                "event": "progress",
                "turns": turns,
                "done": reused + made,
                "failed": 2,
                "requeued": 1,
                "in_flight": 7,
                "output_tokens": 100 * made,
            }
        )
        t += 30
    return events


def samples(t: float, *, state: str = "ready", rate: int = 500, seconds: int = 60) -> list[Sample]:
    return [
        Sample(
            t=t - back,
            state=state,
            epoch=1,
            running=10,
            queued=3,
            capacity=10,
            decode_tokens=rate * (1000 - back),
        )
        for back in range(seconds, -1, -1)
    ]


def test_the_line_says_it_all() -> None:
    events = client("0-of-2", T - 900, T)
    server = server_now(SERVER, {"state": "ready", "since": T - 950}, samples(T), T)
    shards = [
        shard_now("0-of-2", [events], finished=False, t=T, patience_s=90),
        shard_now("1-of-2", [], finished=False, t=T, patience_s=90),
    ]
    other = ServerNow(**{**server.__dict__, "server": "h/s1"})
    said = line(summary(T, 2000, [events], [server, other], shards, {}))
    assert said.startswith(
        "900 of 2,000 turns (45 %); 1,000 tok/s now, 500 per GPU, 100 since the start; 20 running, 6 queued"
    )
    assert "2 failed tries" in said and "18 min left" in said
    assert "\n" not in said


def test_before_the_first_answers_no_rate_and_no_verdict_is_made_up() -> None:
    """llama.cpp's token counter stands still until an answer ends."""
    standing = [
        Sample(t=T - back, epoch=1, running=8, capacity=8, generation_tokens=0) for back in (60, 30, 0)
    ]
    server = server_now(SERVER, {"state": "ready"}, standing, T)
    events: list[Event] = [{"t": T - 60, "shard": "0-of-1", "event": "started", "turns": 50, "reused": 5}]
    shard = shard_now("0-of-1", [events], finished=False, t=T, patience_s=90)
    said = line(summary(T, 50, [events], [server], [shard], {}))
    assert said == "5 of 50 turns (10 %); no rate yet; 8 running, 0 queued; time left not known yet"
    nothing_runs = [Sample(t=T - back, running=0, generation_tokens=900) for back in (60, 0)]
    assert server_now(SERVER, {"state": "ready"}, nothing_runs, T).tok_s == 0


def test_servers_that_are_not_ready_are_named() -> None:
    silent = server_now(SERVER, {"state": "ready"}, samples(T - 100), T)
    starting = server_now(SERVER, {"state": "starting", "since": T - 5}, samples(T, state="starting"), T)
    given_up = server_now(SERVER, {"state": "given_up", "error": "no memory"}, samples(T - 100), T)
    assert silent.state == "silent" and silent.running is None and silent.tok_s is None
    assert fleet_trouble([silent, starting, given_up]) == (
        "1 server given up, 1 server without a sign of life, 1 server starting"
    )


def test_a_shard_goes_from_waiting_to_done() -> None:
    events = client("0-of-1", T - 300, T, turns=400, reused=50)
    states = [
        shard_now("0-of-1", [], finished=False, t=T, patience_s=90),
        shard_now("0-of-1", [events], finished=False, t=T, patience_s=90),
        shard_now("0-of-1", [events], finished=False, t=T + 1000, patience_s=90),
        shard_now("0-of-1", [events], finished=True, t=T + 1000, patience_s=90),
        shard_now("0-of-1", [], finished=True, t=T, patience_s=90),
    ]
    assert [shard.state for shard in states] == ["waiting", "running", "stopped", "done", "done"]
    assert [shard.done for shard in states] == [0, 350, 350, 400, 0]
    assert states[1].tok_s == pytest.approx(100)
    assert states[1].left_s == pytest.approx(50)


def test_only_the_present_part_counts_for_rates() -> None:
    before = client("0-of-2", T - 100_000, T - 99_000)
    now = [client("0-of-2", T - 600, T, reused=990), client("1-of-2", T - 600, T)]
    assert latest_part([before, *now]) in (now, now[::-1])


@given(st.floats(0.05, 50.0), st.integers(1, 100_000))
def test_the_time_left_is_about_right_and_inside_its_range(per_s: float, left: int) -> None:
    found = time_left([client("0-of-1", T - 1500, T, turns=10**6, per_s=per_s)], left, T)
    assert found is not None
    assert found.soonest <= found.seconds <= found.latest
    assert found.soonest <= left / per_s * 1.05 and found.latest >= left / per_s * 0.95


def test_too_little_is_no_estimate() -> None:
    assert time_left([client("0-of-1", T - 60, T)], 100, T) is None
    assert time_left([], 100, T) is None
    assert left_said(None) == "time left not known yet"
    assert time_left([], 0, T) == Left(0, 0, 0)


def test_nothing_at_all_is_a_line_too() -> None:
    assert line(summary(T, None, [], [], [], {})) == "0 of 0 turns; no rate yet; time left not known yet"


def test_prometheus_text_is_well_formed() -> None:
    server = server_now(SERVER, {"state": "ready"}, samples(T), T)
    odd = ServerNow(**{**server.__dict__, "server": 'a"b\\c\n'})
    text = prometheus(summary(T, 10, [], [server, odd], [], {"loop": 3}))
    assert 'draftmill_rejected_turns{reason="loop"} 3\n' in text
    assert 'draftmill_server_running{server="a\\"b\\\\c\\n"} 10\n' in text
    assert "draftmill_seconds_left" not in text, "what is not known is left out"
    names = [entry.split()[2] for entry in text.splitlines() if entry.startswith("# TYPE")]
    assert len(names) == len(set(names)) and text.endswith("\n")


@pytest.mark.parametrize(
    ("seconds", "said"), [(42, "42 s"), (2127, "35 min"), (21_240, "5.9 h"), (223_200, "2.58 d")]
)
def test_times_are_rough(seconds: float, said: str) -> None:
    assert roughly(seconds) == said
