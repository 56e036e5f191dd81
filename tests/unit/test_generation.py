"""Walks through conversations, and the table that is derived from the journal."""

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.frozen_model import PLAIN, THINKING, freeze
from tests.unit.test_aside import ended_pid

from draftmill import config as settings
from draftmill import partial, science
from draftmill.chat import ChatTemplate
from draftmill.errors import UserError
from draftmill.generation import Shard, Turn, Walk
from draftmill.journal import Journal, Writer
from draftmill.rows import GENERATED
from draftmill.sharding import shard_prompts
from draftmill.tokens import Tokenizer

STOP = 257  # <|im_end|>
LAX = dict.fromkeys(
    ("truncated", "loop", "garbage", "too_few_supervised", "duplicate_answer", "reasoning_unfinished"), "keep"
)
Reply = str | dict[str, Any]  # an answer that stops by itself, or a whole record


class Bench:
    """A run's folder: prompts sharded by the real rule, a journal, and somebody who answers."""

    def __init__(
        self,
        folder: Path,
        rows: list[dict[str, Any]],
        *,
        shards: int = 1,
        context: int = 4096,
        template: str = PLAIN,
        journal: Path | None = None,
        seed: int = 0,
        **blocks: Mapping[str, Any],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "prompts.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        given = {name: dict(values) for name, values in blocks.items()}
        self.config = settings.resolve(
            {
                "seed": seed,
                "shards": shards,
                **given,
                "prompts": {"files": [str(source)], "limit": None, **given.get("prompts", {})},
                "validation": {**LAX, **given.get("validation", {})},
                "sampling": {"max_tokens": 64, **given.get("sampling", {})},
            }
        )
        self.folder = folder
        self.model = freeze(folder / "model", context, template)
        self.tokenizer, self.template = Tokenizer.load(self.model), ChatTemplate.load(self.model)
        self.files = [folder / "shards" / f"{n + 1}-of-{shards}.parquet" for n in range(shards)]
        shard_prompts(
            self.config, self.model, self.files, folder / "skipped.parquet", folder / "prompts.json"
        )
        self.shard = Shard(self.config, self.model)
        self.rows = [row for file in self.files for row in self.shard.rows(file)]
        self.journal = journal or folder / "journal"

    def record(self, reply: Reply) -> dict[str, Any]:
        if isinstance(reply, dict):
            return reply
        return {
            "outcome": "answered",
            "output_ids": [*self.tokenizer.encode(reply), STOP],
            "finish_reason": "stop",
        }

    def cut(self, text: str) -> dict[str, Any]:
        return {"outcome": "answered", "output_ids": self.tokenizer.encode(text), "finish_reason": "length"}

    def answer(self, reply: Callable[[Turn], Reply], most: int = 10**6) -> list[Turn]:
        """Asks until nothing is missing, or `most` turns are answered; gives the turns that were asked. On the way a
        walk from the answered turn on must find what one from the beginning finds."""
        asked: list[Turn] = []
        writer, fresh = Writer(self.journal), Journal(self.journal)
        for row in self.rows:
            turn = self.shard.walk(row, fresh.get).next
            while len(asked) < most and turn is not None:
                asked.append(turn)
                writer.append(turn.key, self.record(reply(turn)))
                fresh.refresh()
                on, whole = self.shard.walk(row, fresh.get, since=turn), self.shard.walk(row, fresh.get)
                assert (on.facts, on.next) == (whole.facts[turn.index :], whole.next)
                assert on.rejected == whole.rejected
                turn = on.next
        writer.close()
        fresh.close()
        return asked

    def walks(self) -> list[Walk]:
        journal = Journal(self.journal)
        return [self.shard.walk(row, journal.get) for row in self.rows]

    def table(self, partial: bool = False) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.write("table.parquet", partial)).to_pylist()
        return found

    def write(self, name: str, partial: bool = False) -> Path:
        path = self.folder / name
        self.shard.write(self.rows, Journal(self.journal), path, partial)
        return path


def talk(name: str, *asked: str) -> dict[str, Any]:
    """A conversation with old answers between its user messages."""
    messages = [
        message
        for text in asked
        for message in ({"role": "user", "content": text}, {"role": "assistant", "content": f"old {text}"})
    ]
    return {"id": name, "messages": messages}


def test_every_turn_is_conditioned_on_our_own_answers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two", "three")])
    asked = bench.answer(lambda turn: f"answer {turn.index}")
    assert [str(turn) for turn in asked] == ["t_gen0", "t_gen1", "t_gen2"]
    expected = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "three"},
    ]
    table = bench.table()
    for index, row in enumerate(table):
        messages = expected[: 2 * index + 1]
        assert json.loads(row["messages"]) == messages
        assert bench.tokenizer.decode(row["prompt_ids"]) == bench.template.render(messages)
        assert row["prompt_ids"] == list(asked[index].prompt_ids)
        assert bench.tokenizer.decode(row["output_ids"]) == f"answer {index}<|im_end|>"
        assert row["outcome"] == "answered" and row["turn_index"] == index and row["key"] == asked[index].key
    assert len({turn.key for turn in asked}) == len({turn.sampling["seed"] for turn in asked}) == 3


def test_another_answer_makes_another_next_turn(tmp_path: Path) -> None:
    keys = []
    for name in ("a", "b"):
        bench = Bench(tmp_path / name, [talk("t", "one", "two")])
        keys.append([turn.key for turn in bench.answer(lambda _, name=name: name)])  # type: ignore[misc]
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]


def test_history_is_without_reasoning(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")], template=THINKING, prompts={"thinking": True})
    _, second = bench.answer(lambda _: "<think>\nsecret\n</think>\n\nyes")
    assert second.messages[1] == {"role": "assistant", "content": "yes"}
    assert "secret" not in bench.tokenizer.decode(second.prompt_ids)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_thinking_switch_holds_for_every_turn(tmp_path: Path, thinking: bool | None) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")], template=THINKING, prompts={"thinking": thinking})
    asked = bench.answer(lambda _: "yes")
    switched_off = [bench.tokenizer.decode(turn.prompt_ids).endswith("<think></think>") for turn in asked]
    assert switched_off == [thinking is False] * 2
    # this template thinks unless it is told not to
    assert [row["thinking"] for row in bench.table()] == [thinking is not False] * 2


# --- what ends a conversation


def test_turns_after_a_rejected_answer_are_not_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two", "three")])
    asked = bench.answer(lambda turn: "fine" if turn.index == 0 else "  ")
    assert [turn.index for turn in asked] == [0, 1]
    (walk,) = bench.walks()
    assert walk.rejected == "empty" and walk.next is None
    first, second, third = bench.table()
    assert (first["outcome"], second["outcome"], third["outcome"]) == ("answered", "answered", "unasked")
    assert third["detail"] == "an earlier turn of the conversation was rejected"
    assert third["prompt_ids"] == [] and third["output_ids"] == [] and third["started_at"] is None


@pytest.mark.parametrize("outcome", ["refused", "poison"])
def test_turns_after_one_without_an_answer_are_not_asked(tmp_path: Path, outcome: str) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")])
    asked = bench.answer(lambda _: {"outcome": outcome, "detail": "why"})
    assert len(asked) == 1
    first, second = bench.table()
    assert (first["outcome"], first["detail"], second["outcome"]) == (outcome, "why", "unasked")
    assert first["prompt_ids"] == list(asked[0].prompt_ids)


def test_one_conversations_end_is_not_anothers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("a", "one", "two"), talk("b", "eins", "zwei")])
    bench.answer(lambda turn: " " if turn.row.primary_id == "a" else "ja")
    assert [row["outcome"] for row in bench.table()] == ["answered", "unasked", "answered", "answered"]


def test_a_prompt_that_outgrows_the_context_is_refused_unasked_with_the_figures(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two", "three")], context=200)
    asked = bench.answer(lambda _: "x" * 90)
    assert [turn.index for turn in asked] == [0]
    _, second, third = bench.table()
    assert second["outcome"] == "refused" and third["outcome"] == "unasked"
    assert len(second["prompt_ids"]) > 100, "what was too long is shown"
    assert f"has {len(second['prompt_ids'])} tokens" in second["detail"]
    assert "max_tokens 64" in second["detail"] and "context of 200" in second["detail"]


def test_or_its_answer_is_shortened_where_the_policy_says_so(tmp_path: Path) -> None:
    policy = {"context_policy": "shorten", "min_max_tokens": 16}
    bench = Bench(tmp_path, [talk("t", "one", "two", "three")], context=200, prompts=policy)
    _, second = bench.answer(lambda turn: "x" * (90 if turn.index == 0 else 40))
    room = bench.shard.model.room(len(second.prompt_ids))
    assert 16 <= room < 64 and second.sampling["max_tokens"] == room
    table = bench.table()
    assert [row["outcome"] for row in table] == ["answered", "answered", "refused"]
    assert table[1]["max_tokens"] == room and json.loads(table[1]["sampling"])["max_tokens"] == room


def test_messages_that_the_template_refuses_are_refused(tmp_path: Path) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + PLAIN
    bench = Bench(tmp_path, [talk("t", "one", "two", "three")], template=template)
    assert len(bench.answer(lambda _: "yes")) == 1
    assert [(row["outcome"], row["detail"]) for row in bench.table()[:2]] == [
        ("answered", None),
        ("refused", "one message only"),
    ]


# --- a second, longer try


RETRY = {"truncated": "retry_longer", "retry_longer_factor": 2}


def test_a_cut_answer_is_asked_again_with_more_tokens_and_the_longer_one_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")], validation=RETRY)
    asked = bench.answer(
        lambda turn: "long enough" if turn.sampling["max_tokens"] > 64 or turn.index else bench.cut("cut")
    )
    assert [(turn.index, turn.sampling["max_tokens"]) for turn in asked] == [(0, 64), (0, 128), (1, 64)]
    assert asked[0].key != asked[1].key and asked[0].prompt_ids == asked[1].prompt_ids
    assert asked[2].messages[1]["content"] == "long enough"
    first, _ = bench.table()
    assert first["key"] == asked[1].key and first["max_tokens"] == 128 and first["finish_reason"] == "stop"


def test_a_second_cut_is_a_rejection_and_no_third_try(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")], validation=RETRY)
    assert len(bench.answer(lambda _: bench.cut("never done"))) == 2
    (walk,) = bench.walks()
    assert walk.rejected == "truncated" and [facts["outcome"] for facts in walk.facts] == [
        "answered",
        "unasked",
    ]


def test_the_context_bounds_the_longer_try(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "x" * 40)], context=180, validation=RETRY)
    first, second = bench.answer(lambda _: bench.cut("cut"))
    assert second.sampling["max_tokens"] == bench.shard.model.room(len(first.prompt_ids)) < 128


def test_where_the_context_leaves_no_more_there_is_no_second_try(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "x" * 40)], context=200, validation=RETRY)
    room = bench.shard.model.room(len(bench.rows[0].prompt_ids))
    tight = Bench(
        tmp_path / "tight",
        [talk("t", "x" * 40)],
        context=200,
        validation=RETRY,
        sampling={"max_tokens": room},
    )
    assert len(tight.answer(lambda _: tight.cut("cut"))) == 1
    assert tight.walks()[0].rejected == "truncated"


def test_another_policy_changes_no_key(tmp_path: Path) -> None:
    rows = [talk("t", "one", "two")]
    strict = Bench(tmp_path, rows, validation=RETRY)
    strict.answer(lambda _: "yes")
    assert Bench(tmp_path, rows, validation={"truncated": "flag"}).answer(lambda _: "no") == []


# --- samples, keys, and where they are found again


def test_samples_are_answered_apart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")], prompts={"samples": 3})
    asked = bench.answer(lambda turn: f"sample {turn.row.sample}")
    assert sorted(map(str, asked)) == sorted(
        ["t_gen0", "t_gen1", "t_s1_gen0", "t_s1_gen1", "t_s2_gen0", "t_s2_gen1"]
    )
    assert len({turn.key for turn in asked}) == 6
    table = bench.table()
    assert [row["id"] for row in table] == sorted(row["id"] for row in table)
    for row in table:
        assert bench.tokenizer.decode(row["output_ids"]) == f"sample {row['sample']}<|im_end|>"


def test_another_number_of_shards_another_order_and_more_prompts_find_what_is_finished(
    tmp_path: Path,
) -> None:
    rows = [talk(f"t{n}", f"one {n}", f"two {n}") for n in range(12)]
    Bench(tmp_path / "a", rows, journal=tmp_path / "journal").answer(lambda turn: f"to {turn.row.primary_id}")
    shuffled = random.Random(1).sample(rows, len(rows))
    again = Bench(
        tmp_path / "b", [*shuffled, talk("new", "a new one")], shards=3, journal=tmp_path / "journal"
    )
    assert again.shard.new_conversations(again.files, Journal(again.journal)) == (1, 13)
    assert [str(turn) for turn in again.answer(lambda _: "hello")] == ["new_gen0"]


def test_an_id_does_not_decide_and_the_content_does(tmp_path: Path) -> None:
    one, other, third = (
        Bench(tmp_path / str(n), rows).answer(lambda _: "yes")[0]
        for n, rows in enumerate([[talk("a", "same")], [talk("b", "same")], [talk("a", "other")]])
    )
    assert one.key == other.key != third.key
    assert one.sampling["seed"] == other.sampling["seed"] != third.sampling["seed"]


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"temperature": 0.25}},
        {"sampling": {"stop": ["x"]}},
        {"seed": 7},
        {"model": {"dtype": "half"}},
    ],
)
def test_other_science_finds_nothing_and_spoils_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = [talk("t", "one")]
    bench = Bench(tmp_path, rows)
    bench.answer(lambda _: "first")
    assert len(Bench(tmp_path, rows, **change).answer(lambda _: "second")) == 1
    assert bench.tokenizer.decode(Bench(tmp_path, rows).table()[0]["output_ids"]) == "first<|im_end|>"


def test_a_damaged_answer_is_asked_again_and_only_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("a", "one", "two"), talk("b", "one!")])
    before = bench.answer(lambda turn: f"to {turn}")
    clean = bench.write("clean.parquet").read_bytes()
    (segment,) = bench.journal.glob("*.jsonl")
    raw = bytearray(segment.read_bytes())
    at = raw.index(before[0].key.encode()) + 50
    raw[at : at + 20] = bytes(20)
    segment.write_bytes(raw)
    assert [turn.key for turn in bench.answer(lambda turn: f"to {turn}")] == [before[0].key]
    assert bench.write("again.parquet").read_bytes() == clean


# --- the table


def test_the_table_is_sorted_complete_and_of_the_one_schema(tmp_path: Path) -> None:
    rows = [
        {**talk(name, f"one {name}", "two"), "stars": n}
        for n, name in enumerate(["b", "a", "aa", "B", "é", "a_gen0"])
    ]
    bench = Bench(tmp_path, rows, prompts={"samples": 2, "carry": ["stars"]})
    bench.answer(lambda _: "yes")
    path = bench.write("table.parquet")
    assert pq.read_schema(path).equals(GENERATED)
    table = pq.read_table(path).to_pylist()
    ids = [row["id"] for row in table]
    assert ids == sorted(ids) and len(set(ids)) == 24
    assert {(row["primary_id"], json.loads(row["carried"])["stars"]) for row in table} == {
        (row["id"], row["stars"]) for row in rows
    }
    assert json.loads(table[0]["sampling"]).keys() >= {"temperature", "top_p", "top_k", "seed", "max_tokens"}
    assert not list(bench.folder.glob(".*"))


def test_the_record_stands_in_the_table_as_it_was_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one")])
    facts = {
        "started_at": 1.5, "queue_s": 0.25, "latency_s": 3.0, "server": "host/gpu0", "engine": "sglang 0.5.23",
        "cached_tokens": 7, "attempts": 2,
    }  # fmt: skip
    bench.answer(lambda _: {**bench.record("yes"), **facts})
    (row,) = bench.table()
    assert {name: row[name] for name in facts} == facts


def test_a_missing_turn_is_an_error_and_leaves_the_old_table(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("t", "one", "two")])
    bench.answer(lambda _: "yes", most=1)
    (tmp_path / "table.parquet").write_text("old")
    with pytest.raises(UserError, match="Turn t_gen1 is not in the journal"):
        bench.write("table.parquet")
    assert (tmp_path / "table.parquet").read_text() == "old"


def test_a_partial_table_holds_what_is_settled(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("a", "one", "two"), talk("b", "eins", "zwei")])
    assert bench.table(partial=True) == []
    bench.answer(lambda turn: f"to {turn}", most=1)
    settled = [row["id"] for row in bench.table(partial=True)]
    assert len(settled) == 1
    bench.answer(lambda turn: f"to {turn}", most=2)
    assert len(bench.table(partial=True)) == 3
    bench.answer(lambda turn: f"to {turn}")
    assert (
        bench.write("partial.parquet", partial=True).read_bytes() == bench.write("whole.parquet").read_bytes()
    )


def test_a_killed_partial_does_not_stand_in_the_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [talk("a", "one")])
    science.record(bench.config, tmp_path)
    (tmp_path / "partial" / f".aside-{ended_pid()}").mkdir(parents=True)
    (tmp_path / f".partial-x-{ended_pid()}").mkdir()
    with pytest.raises(UserError, match="No turn is finished yet"):
        partial.write(tmp_path, tmp_path / "partial")
    assert not list(tmp_path.glob(".partial-*"))
    (tmp_path / "partial" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        partial.write(tmp_path, tmp_path / "partial")


# --- the law: resumed or not, the same table, and nothing asked twice


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    rows = [talk(f"t{n}", *(f"{n} {turn}" for turn in range(1 + n % 4))) for n in range(8)]
    return Bench(tmp_path_factory.mktemp("law"), rows, prompts={"samples": 2}, validation=RETRY)


@examples(max_examples=25)
@given(salt=st.integers(0, 10**6), stops=st.lists(st.integers(0, 12), max_size=4))
def test_resumed_at_any_turn_the_table_is_that_of_an_undisturbed_run(
    conversations: Bench, tmp_path_factory: pytest.TempPathFactory, salt: int, stops: list[int]
) -> None:
    bench, folder = conversations, tmp_path_factory.mktemp("journals")

    def pure(turn: Turn) -> Reply:
        """An answer that the key decides alone: good, blank, cut, or none."""
        digest = hashlib.sha256(f"{salt}{turn.key}".encode()).hexdigest()
        kind = int(digest[:2], 16) % 8
        if kind == 0:
            return {"outcome": "refused", "detail": digest}
        if kind == 1:
            return " "
        return bench.cut(digest[:20]) if kind < 4 else f"answer {digest[:8]}"

    bench.journal = folder / "calm"
    expected = [turn.key for turn in bench.answer(pure)]
    undisturbed = bench.write("table.parquet").read_bytes()
    assert len(set(expected)) == len(expected)
    assert len(bench.table()) == sum(row.turn_count for row in bench.rows)
    bench.journal = folder / "broken"
    asked = [turn.key for most in [*stops, 10**6] for turn in bench.answer(pure, most)]
    assert sorted(asked) == sorted(expected)
    assert bench.write("table.parquet").read_bytes() == undisturbed
