"""One row of any shape becomes one conversation, or is refused with a reason."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.conversations import (
    CHAT_COLUMNS,
    COLUMNS,
    RowRefused,
    TurnPolicy,
    normalise,
    row_id,
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


CALL = {"type": "function", "id": "c1", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def turns(row: dict[str, Any], policy: TurnPolicy = "all") -> list[list[dict[str, Any]]]:
    return [list(turn) for turn in normalise(row, policy).conversation.turns]


def refusal(row: dict[str, Any], policy: TurnPolicy = "all") -> RowRefused:
    with pytest.raises(RowRefused) as caught:
        normalise(row, policy)
    return caught.value


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("hi")]},
        {"messages": json.dumps([user("hi")])},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]},
        {"conversation": [user(" hi\r\n")]},
        {"prompt": "hi", "messages": None},
        {"prompt": "hi", "messages": []},
        {"prompt": [user("hi")]},
        {"instruction": "hi", "input": "", "output": "old"},
        {"instruction": "", "input": "hi"},
        {"question": "hi"},
        {"turns": ["hi"]},
        {"messages": [user([{"type": "text", "text": "hi"}])]},
        {"messages": [{"role": "User ", "content": {"type": "text", "text": "hi"}}]},
        {"messages": [{"role": "user", "content": None, "value": "hi"}]},
    ],
)
def test_every_shape_asks_the_same(row: dict[str, Any]) -> None:
    assert turns(row) == [[user("hi")]]


@pytest.mark.parametrize(
    "text",
    [
        "\u200b\u200d\ufeff",  # zero-width space, joiner, byte order mark
        "\ufe0f\U000e0101",  # variation selectors
        "\u2060\u00ad\u200e\u202e\U000e0041",  # word joiner, soft hyphen, directions, tags
        "\u3164\uffa0\u2800\u034f",  # fillers, the Braille blank, the grapheme joiner
        "\x00\x07\x1b \t\u2028\u00a0\u3000",
    ],
)
def test_text_that_nobody_can_see_is_empty(text: str) -> None:
    for row in (
        {"prompt": text},
        {"messages": [user(text), assistant("A")]},
        {"messages": [user("a"), assistant("A"), user([{"type": "text", "text": text}])]},
        {"instruction": text, "input": text},
        {"turns": ["a", text]},
    ):
        assert refusal(row).kind == "empty"
    assert turns({"messages": [system(text), user("a")]}) == [[user("a")]]
    assert turns({"prompt": text, "question": "a"}) == [[user("a")]]


def test_invisible_characters_inside_a_text_stay() -> None:
    for text in (
        "\U0001f469\u200d\U0001f680",
        "\u2764\ufe0f",
        "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\u20dd",
        "\U0001fae8",
    ):
        assert turns({"prompt": text}) == [[user(text)]]


def test_old_answers_are_generated_anew_each_after_what_was_given() -> None:
    row = {"messages": [system("s"), user("a"), assistant("A"), user("b"), assistant("B")]}
    assert turns(row) == [[system("s"), user("a")], [user("b")]]
    assert turns(row, "first") == [[system("s"), user("a")]]
    assert turns(row, "last") == [[system("s"), user("a"), assistant("A"), user("b")]]


def test_the_history_of_the_last_turn_holds_no_reasoning() -> None:
    for old in (
        assistant("<think>\nhm\n</think>\n\n4"),
        assistant("hm</think>4"),
        assistant("4", reasoning_content="hm"),
    ):
        assert turns({"messages": [user("2+2?"), old, user("why?")]}, "last") == [
            [user("2+2?"), assistant("4"), user("why?")]
        ]
    assert (
        refusal({"messages": [user("a"), assistant("<think>never"), user("b")]}, "last").kind
        == "empty_answer"
    )


def test_a_users_literal_think_tag_is_text() -> None:
    assert turns({"prompt": "what is <think> for? </think>"}) == [[user("what is <think> for? </think>")]]


def test_system_texts_stand_merged_in_front() -> None:
    row = {"messages": [system("one"), user("a"), assistant("A"), system("two"), user("b")], "system": "zero"}
    found = normalise(row)
    assert found.conversation.turns[0] == (system("zero\n\none\n\ntwo"), user("a"))
    assert found.notes == ("systems_merged", "system_moved_to_front")


def test_neighbours_of_one_speaker_are_joined_and_a_leading_answer_is_dropped() -> None:
    found = normalise(
        {"messages": [assistant("hello"), user("a"), user("b"), assistant("A"), assistant("B")]}
    )
    assert found.conversation.turns == ((user("a\n\nb"),),)
    assert found.notes == ("users_joined", "assistants_joined", "leading_assistant_dropped")


def test_a_call_of_tools_stays_with_its_results() -> None:
    call = assistant("", tool_calls=[CALL])
    result = {"role": "tool", "content": "12:00", "tool_call_id": "c1"}
    row = {"messages": [user("time?"), call, result, assistant("noon"), user("and now?")], "tools": [TOOL]}
    found = normalise(row).conversation
    assert found.turns == ((user("time?"), call, result), (user("and now?"),))
    assert found.tools == (TOOL,)


def test_a_call_without_results_is_generated_anew() -> None:
    assert turns({"messages": [user("time?"), assistant("", tool_calls=[CALL])]}) == [[user("time?")]]


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "clock", "arguments": '{"zone":"UTC"}'}}],
        },
        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "clock", "arguments": {"zone": "UTC"}}]},
    ],
)
def test_calls_come_in_many_spellings(call: dict[str, Any]) -> None:
    row = {"messages": [user("time?"), call, {"role": "observation", "content": "12:00"}]}
    assert turns(row)[0][1]["tool_calls"] == [CALL]


def test_sharegpt_function_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "time?"},
            {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
            {"from": "observation", "value": "12:00"},
            {"from": "gpt", "value": "noon"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    found = normalise(row).conversation
    assert [m["role"] for m in found.turns[0]] == ["user", "assistant", "tool"]
    assert found.turns[0][1]["tool_calls"][0]["function"] == CALL["function"]
    assert found.tools == (TOOL,)


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    [
        ({}, "no_prompt", "columns are none"),
        ({"txt": "hi"}, "no_prompt", '"txt"'),
        ({"prompt": None}, "empty", "prompt"),
        ({"prompt": " \n"}, "empty", "prompt"),
        ({"messages": None}, "empty", "messages"),
        ({"messages": [user("")]}, "empty", "user"),
        ({"messages": [user("a"), assistant("A"), user(" ")]}, "empty", "user"),
        ({"messages": [user(""), user("b")]}, "empty", "user"),
        ({"messages": [system("s")]}, "no_user_turn", "user"),
        ({"messages": [assistant("A")]}, "no_user_turn", "user"),
        ({"messages": [{"from": "narrator", "value": "x"}]}, "unknown_role", '"narrator"'),
        ({"messages": [{"content": "x"}]}, "unknown_role", "no role"),
        ({"messages": ["hi"]}, "not_messages", "text"),
        ({"messages": {"role": "user"}}, "not_messages", "an object"),
        ({"messages": "hello"}, "not_messages", '"hello"'),
        ({"messages": [user(7)]}, "not_text", "a number"),
        ({"prompt": 7}, "not_text", "a number"),
        ({"prompt": "hi\ud83d"}, "lone_surrogate", "U+D83D"),
        ({"prompt": "caf\udce9"}, "not_utf8", 'byte 0xe9 behind "caf"'),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "image", "image_url"),
        ({"messages": [user([{"type": "text", "text": "see"}, {"type": "image"}])]}, "image", "image"),
        ({"messages": [user([{"text": "see", "image_url": "x"}])]}, "image", "image_url"),
        ({"messages": [user([{"type": "input_audio", "x": 1}])]}, "unsupported_content", "input_audio"),
        ({"prompt": "see <image>", "images": ["x"]}, "image", "images"),
        ({"conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]}, "image", "<image>"),
        ({"messages": [user("Look at this. <video>")]}, "image", "<video>"),
        ({"prompt": "see data:image/png;base64," + "A" * 200}, "image", "base64"),
        ({"messages": [user("a"), {"role": "tool", "content": "x"}]}, "orphan_tool_result", "no call"),
        ({"messages": [user("a"), assistant("", tool_calls=[{}])]}, "tool_calls_unreadable", "no function"),
        ({"prompt": "a", "tools": "{"}, "tools_unreadable", "not valid JSON"),
        ({"prompt": "a", "tools": [1]}, "tools_unreadable", "objects"),
        ({"prompt": "a", "tools": [{"name": "x", "max": float("inf")}]}, "not_json", "JSON"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_reason(row: dict[str, Any], kind: str, told: str) -> None:
    refused = refusal(row)
    assert refused.kind == kind
    assert told in refused.sentence


def test_talk_of_images_is_text() -> None:
    for text in ("What does <image> do in SVG?", "<image>\n<url>x</url>\n</image>", "![a](http://x/a.png)"):
        assert turns({"prompt": text}) == [[user(text)]]


def test_what_a_hostile_row_says_stays_short_and_printable() -> None:
    refused = refusal({"messages": [{"role": "\x1b[31m" * 1000, "content": "x"}]})
    assert len(refused.sentence) < 200 and refused.sentence.isprintable()


def test_deep_nesting_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert refusal({"prompt": "a", "tools": [{"name": "x", "parameters": deep}]}).kind == "too_deep"


def test_ids_are_kept_as_text_to_the_last_digit() -> None:
    assert row_id({"id": 2**128}) == str(2**128)
    assert row_id({"id": "007"}) == "007"
    assert row_id({"id": None, "uuid": "u"}) == "u"
    for none in (None, "", True, [1], "x" * 1000, "a\nb", "\ud800", float("nan")):
        assert row_id({"id": none}) is None


def test_a_system_prompt_is_put_first_unless_there_is_one() -> None:
    bare, own = (
        normalise({"prompt": "a"}).conversation,
        normalise({"prompt": "a", "system": "s"}).conversation,
    )
    assert bare.with_system(" t ").turns == ((system("t"), user("a")),)
    assert own.with_system("t") is own
    assert bare.with_system("") is bare


def test_the_content_hash_names_what_is_asked_and_what_was_answered_before() -> None:
    messages = [user("a "), assistant("old"), user("b")]
    one = normalise({"id": 1, "messages": messages}).conversation
    same = normalise(
        {"id": 2, "conversations": [user("a"), assistant(" old"), user("b")], "x": 1}
    ).conversation
    assert one.content_hash() == same.content_hash() and len(one.content_hash()) == 32
    for row in (
        {"messages": [user("a"), assistant("other"), user("b")]},  # asked the same, answered otherwise
        {"messages": [*messages, assistant("more")]},
        {"messages": [user("a"), user("b")]},
        {"messages": messages, "tools": [TOOL]},
    ):
        assert one.content_hash() != normalise(row).conversation.content_hash()


WORDS = [
    "user",
    "human",
    "assistant",
    "system",
    "tool",
    "function_call",
    "text",
    "image",
    "<think>",
    "\ud83d",
    "a",
    "",
]
KEYS = [
    "role",
    "from",
    "content",
    "value",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
]


def hostile(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(4 if depth < 4 else 2)
    if kind == 0:
        return draw.choice(WORDS)
    if kind == 1:
        return draw.choice(
            [None, True, 0, 1.5, float("nan"), 10**30, "\udce9", "</think>", '[{"name": "f"}]']
        )
    if kind == 2:
        return [hostile(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): hostile(draw, depth + 1) for _ in range(draw.randrange(5))}


def likely(draw: random.Random) -> Any:
    """A list of messages, most of them sound."""
    messages = []
    for _ in range(draw.randrange(6)):
        message: dict[str, Any] = {"role": draw.choice(WORDS[:6]), "content": draw.choice(WORDS)}
        if draw.random() < 0.3:
            message["tool_calls"] = draw.choice([[CALL], hostile(draw)])
        if draw.random() < 0.1:
            message[draw.choice(KEYS)] = hostile(draw)
        messages.append(message)
    return messages


@settings(max_examples=1000)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["all", "last", "first"]))
def test_any_row_is_a_sound_conversation_or_refused(seed: int, policy: TurnPolicy) -> None:
    draw = random.Random(seed)
    row = {draw.choice(COLUMNS): hostile(draw) for _ in range(draw.randrange(3))}
    if draw.random() < 0.7:
        row[draw.choice(CHAT_COLUMNS)] = likely(draw)
    try:
        conversation = normalise(row, policy).conversation
    except RowRefused as refused:
        assert refused.kind and refused.sentence.encode()
        return
    assert json.loads(conversation.canonical) == [
        json.loads(json.dumps(t)) for t in (conversation.turns, conversation.tools)
    ]
    assert all(turn for turn in conversation.turns)
    for number, turn in enumerate(conversation.turns):
        for place, message in enumerate(turn):
            assert isinstance(message["content"], str)
            assert message["role"] != "system" or (number, place) == (0, 0)
            assert message["role"] != "user" or message["content"]
        assert turn[-1]["role"] in ("user", "tool")
