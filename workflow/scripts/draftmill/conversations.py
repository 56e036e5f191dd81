"""Conversations: what one row of a prompt file asks for, whichever shape the row has.

Knows the shapes that prompt files come in (``messages``, ShareGPT, a bare prompt, Alpaca, with or without
tools) and the one shape that the rest of Draftmill works on. Pure. Must never know files, tokens, the
chat template or the run's seed; must never let a message through that is not text.

Policies, in one place:

* Text is trimmed at both ends and Windows line ends become ``\\n``; nothing else is changed.
* Text of invisible characters only (zero-width spaces, variation selectors, fillers) is empty.
* All system messages stand merged, in order, in front, wherever they stood.
* Consecutive messages of one speaker are joined by a blank line.
* Whatever an assistant or a tool says before the first user message is dropped.
* Old answers are dropped; a call of tools stays, with the results that follow it.
* Text parts of a message are joined by a line break. Images, sound and files refuse the row.
* A lone surrogate (half an emoji) or bytes that are not UTF-8 refuse the row: guessing would change the prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

Message = dict[str, Any]
"""``role`` and ``content`` (both str); where given ``tool_calls`` (list), ``tool_call_id``, ``name``."""

TurnPolicy = Literal["all", "last", "first"]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response"), "tool"),
}
CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("prompt", "instruction", "question", "problem", "query")
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions")
ID_COLUMNS = ("id", "conversation_id", "prompt_id", "uuid")
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
COLUMNS = (
    *CHAT_COLUMNS,
    *TEXT_COLUMNS,
    *SYSTEM_COLUMNS,
    *TOOL_COLUMNS,
    *ID_COLUMNS,
    *MEDIA_COLUMNS,
    *("turns", "input", "output", "history"),
)
"""Every column that can matter to a conversation."""

LONGEST_ID = 200
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")  # where LLaVA's kind of data has the thing itself put
_INLINE_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/]{100}")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_INVISIBLE_CATEGORIES = frozenset(("Cc", "Cf", "Zl", "Zp", "Zs"))
# what draws nothing though its category is a letter's, a mark's or a symbol's: Unicode's default ignorables
# (joiners, fillers, variation selectors) and the Braille blank
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)


class RowRefused(Exception):
    """A row that cannot be used: ``kind`` is a short snake_case name, ``sentence`` is for a person."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(kind, sentence)
        self.kind = kind
        self.sentence = sentence


@dataclass(frozen=True)
class Conversation:
    """``turns[k]`` holds the messages given before answer ``k`` is generated, never an old answer.

    ``old_answers`` is a digest of the answers that were left out ("" without any): two rows that ask the
    same and differ in what was answered before are two conversations, and get answers of their own.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()
    old_answers: str = ""

    @cached_property
    def canonical(self) -> bytes:
        """Strict JSON in strict UTF-8, the same for the same conversation; RowRefused where that cannot be."""
        try:
            text = json.dumps(
                [self.turns, self.tools],
                ensure_ascii=False,
                sort_keys=True,
                separators=(",", ":"),
                allow_nan=False,
            )
        except (ValueError, TypeError) as fault:
            raise RowRefused(
                "not_json", f"its tools or tool calls cannot be written as JSON ({fault})"
            ) from fault
        try:
            return text.encode()
        except UnicodeEncodeError as fault:
            before = text[max(0, fault.start - 20) : fault.start].rpartition('"')[2]
            character = text[fault.start]
            if _NOT_UTF8.match(character):
                byte = f"0x{ord(character) - 0xDC00:02x}"
                raise RowRefused(
                    "not_utf8",
                    f"byte {byte} behind {_shown(before)} is not UTF-8; convert the file, "
                    "for instance with iconv -f latin1 -t utf-8",
                ) from fault
            raise RowRefused(
                "lone_surrogate", f"half of a surrogate pair (U+{ord(character):04X}) behind {_shown(before)}"
            ) from fault

    def content_hash(self) -> str:
        """32 hex digits of the canonical JSON and the old answers: names the conversation wherever it stands."""
        return hashlib.blake2b(self.canonical + self.old_answers.encode(), digest_size=16).hexdigest()

    def texts(self) -> list[str]:
        """The contents of the user's messages, in order."""
        return [m["content"] for turn in self.turns for m in turn if m["role"] == "user"]

    def with_system(self, text: str) -> Conversation:
        """The same conversation with ``text`` as its system prompt, unless it has one of its own."""
        first = self.turns[0]
        text = _trimmed(text)
        if first[0]["role"] == "system" or not text:
            return self
        return replace(self, turns=(({"role": "system", "content": text}, *first), *self.turns[1:]))


@dataclass(frozen=True)
class Normalised:
    """A conversation and what had to be done to the row (short snake_case notes)."""

    conversation: Conversation
    notes: tuple[str, ...]


def normalise(row: Mapping[str, Any], turns: TurnPolicy = "all") -> Normalised:
    """The conversation that ``row`` (column → value as read, JSON-like) asks for.

    Raises RowRefused, and nothing else, for a row that cannot be used.
    """
    try:
        return _normalise(row, turns)
    except RecursionError as fault:
        raise RowRefused("too_deep", "its values are nested too deeply") from fault


def row_id(row: Mapping[str, Any]) -> str | None:
    """The user's id as text, to the last digit; None where there is none that can be kept."""
    for column in ID_COLUMNS:
        value = row.get(column)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        text = str(value).strip()
        if (
            text and text != "nan" and len(text) <= LONGEST_ID and text.isprintable()
        ):  # false for controls and surrogates
            return text
    return None


def _normalise(row: Mapping[str, Any], policy: TurnPolicy) -> Normalised:
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise RowRefused("image", f"the row has something in its column {column}; only text can be asked")
    notes: list[str] = []
    raw = _raw_messages(row)
    extra = [{"role": "system", "content": row[c]} for c in SYSTEM_COLUMNS if row.get(c) is not None]
    messages = [_message(m, place) for place, m in enumerate([*extra, *raw], 1 - len(extra))]

    systems = [m["content"] for m in messages if m["role"] == "system" and m["content"]]
    if len(systems) > 1:
        notes.append("systems_merged")
    spoken = False
    for m in messages:
        if m["role"] == "system" and spoken:
            notes.append("system_moved_to_front")
            break
        spoken = spoken or m["role"] != "system"

    rest = _joined([m for m in messages if m["role"] != "system"], notes)
    start = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if start is None:
        raise RowRefused("no_user_turn", "it has no message of a user")
    if start:
        notes.append("leading_assistant_dropped")
    rest = rest[start:]
    _check(rest)

    found = _turns(rest)
    if policy == "last":
        found = [_history(rest)]
    elif policy == "first":
        found = found[:1]
    if systems:
        found[0].insert(0, {"role": "system", "content": "\n\n".join(systems)})
    conversation = Conversation(tuple(tuple(turn) for turn in found), _tools(row), _digest_of_answers(rest))
    for text in conversation.texts():
        _refuse_media(text)
    _ = conversation.canonical
    return Normalised(conversation, tuple(notes))


def _refuse_media(text: str) -> None:
    for mark in _PLACEHOLDERS:
        if (text.startswith(mark) or text.endswith(mark)) and f"</{mark[1:]}" not in text:
            raise RowRefused("image", f"a message has the placeholder {mark}; only text can be asked")
    if "data:image/" in text and _INLINE_IMAGE.search(text):
        raise RowRefused("image", "a message holds an image written as base64 text")


def _digest_of_answers(messages: Sequence[Message]) -> str:
    answers = [
        m["content"] for m in messages if m["role"] == "assistant" and m["content"] and "tool_calls" not in m
    ]
    if not answers:
        return ""
    text = json.dumps(answers)  # escapes whatever is no text, lone surrogates among it
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- the shapes of rows


def _raw_messages(row: Mapping[str, Any]) -> list[Any]:
    for column in CHAT_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            value = _parsed(value, "[", "not_messages", column)
        if value and not isinstance(value, list):
            raise RowRefused("not_messages", f"its {column} is {_kind(value)}, not a list of messages")
        if value:
            return list(value)
    if isinstance(prompt := row.get("prompt"), list) and prompt:
        return prompt
    if row.get("turns"):
        return _questions(row["turns"])
    for column in TEXT_COLUMNS:
        value = row.get(column)
        if isinstance(value, str) and visible(value):
            return _alpaca(row, value) if column == "instruction" else [{"role": "user", "content": value}]
        if value not in (None, "", []) and not isinstance(value, str):
            raise RowRefused("not_text", f"its {column} is {_kind(value)}, not text")
    if "instruction" in row and row.get("input"):
        return _alpaca(row, "")
    empty = next((c for c in (*CHAT_COLUMNS, *TEXT_COLUMNS) if c in row), None)
    if empty is not None:
        raise RowRefused("empty", f"its {empty} is empty")
    names = ", ".join(_shown(str(name)) for name in list(row)[:8]) or "none"
    known = ", ".join((*CHAT_COLUMNS, *TEXT_COLUMNS))
    raise RowRefused("no_prompt", f"it has no prompt: its columns are {names}; known are {known}")


def _alpaca(row: Mapping[str, Any], instruction: str) -> list[Any]:
    given = row.get("input")
    if given is not None and not isinstance(given, str):
        raise RowRefused("not_text", f"its input is {_kind(given)}, not text")
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
        raise RowRefused("not_messages", "its history is not a list of [question, answer]")
    messages: list[Any] = []
    for pair in history:
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    text = "\n\n".join(part for part in (_trimmed(instruction), _trimmed(given or "")) if part)
    messages.append({"role": "user", "content": text})
    answer = row.get("output")
    return [*messages, {"role": "assistant", "content": answer}] if isinstance(answer, str) else messages


def _questions(value: Any) -> list[Any]:
    if not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        raise RowRefused("not_text", "its turns are not a list of texts")
    messages: list[Any] = []
    for text in value:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    return messages[:-1]


def _tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    for column in TOOL_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            value = _parsed(value, "[{", "tools_unreadable", column)
        if not value:
            continue
        tools = value if isinstance(value, list) else [value]
        if not all(isinstance(tool, dict) for tool in tools):
            raise RowRefused("tools_unreadable", f"its {column} are not a list of objects")
        return tuple(
            t if "function" in t or "name" not in t else {"type": "function", "function": t} for t in tools
        )
    return ()


def _parsed(text: str, opens: str, kind: str, column: str) -> Any:
    """A column that holds JSON as text (csv, and parquet written by some tools); None when it is blank."""
    text = text.strip()
    if not text:
        return None
    if text[0] in opens:
        try:
            return json.loads(text, parse_constant=lambda _: None)
        except ValueError as fault:
            raise RowRefused(kind, f"its {column} is text that is not valid JSON ({fault})") from fault
    raise RowRefused(kind, f"its {column} is the text {_shown(text)}, not a list")


# --- one message


def _message(raw: Any, place: int) -> Message:
    if not isinstance(raw, dict):
        raise RowRefused(
            "not_messages", f"message {place} is {_kind(raw)}, not an object with role and content"
        )
    name = raw.get("role") if raw.get("role") is not None else raw.get("from")
    if not isinstance(name, str):
        raise RowRefused("unknown_role", f"message {place} has no role")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise RowRefused("unknown_role", f'message {place} has the unknown role "{_clipped(name)}"')
    content = raw.get("content") if raw.get("content") is not None else raw.get("value")
    message: Message = {"role": role}
    if name.strip().lower() == "function_call":
        calls, content = _tool_calls([content], place), None
    else:
        calls = _tool_calls(raw.get("tool_calls"), place) if role == "assistant" else []
        if role == "assistant" and not calls and raw.get("function_call"):
            calls = _tool_calls([raw["function_call"]], place)
    text = _trimmed(_text(content, role, place))
    message["content"] = _without_reasoning(text) if role == "assistant" else text
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if isinstance(raw.get(key), str) and raw[key]:
            message[key] = raw[key]
    return message


def _without_reasoning(text: str) -> str:
    """An old answer without the reasoning in front of it, also where the template had opened the tag."""
    end = text.find("</think>")
    if text.startswith("<think>"):
        return text[end + 8 :].strip() if end >= 0 else ""
    return text[end + 8 :].strip() if end >= 0 and "<think>" not in text[:end] else text


def _text(content: Any, role: str, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if role == "tool" and isinstance(content, dict) and "type" not in content:
        return json.dumps(content, ensure_ascii=False, default=str)
    parts = content if isinstance(content, list) else [content]
    return "\n".join(_part(part, place) for part in parts)


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowRefused("not_text", f"the content of message {place} is {_kind(part)}, not text")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", None) and isinstance(part.get("text"), str):
        payload = next((k for k, v in part.items() if v and k not in ("type", "text", "cache_control")), None)
        if kind is not None or payload is None:
            return str(part["text"])
        kind = payload
    shown = _clipped(str(kind)) if kind is not None else ", ".join(_clipped(str(k)) for k in list(part)[:4])
    if "image" in shown or {"bytes", "path"} <= part.keys():
        raise RowRefused("image", f"message {place} holds an image ({shown}); only text can be asked")
    raise RowRefused(
        "unsupported_content", f'message {place} holds a part of type "{shown}"; only text can be asked'
    )


def _tool_calls(raw: Any, place: int) -> list[dict[str, Any]]:
    if isinstance(raw, str):
        raw = _parsed(raw, "[{", "tool_calls_unreadable", f"message {place}")
    if not raw:
        return []
    calls = []
    for given in raw if isinstance(raw, list) else [raw]:
        call = given
        if isinstance(given, str):
            call = _parsed(given, "{", "tool_calls_unreadable", f"message {place}")
        function = call.get("function", call) if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise RowRefused("tool_calls_unreadable", f"a tool call of message {place} has no function name")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        kept: dict[str, Any] = {"type": "function"}
        if isinstance(call.get("id"), str):
            kept["id"] = call["id"]
        kept["function"] = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        calls.append(kept)
    return calls


# --- messages into turns


def _joined(messages: Iterable[Message], notes: list[str]) -> list[Message]:
    """Consecutive messages of one speaker as one; tool results stay apart, each answers its own call."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and groups[-1][0]["role"] == message["role"] != "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    joined = []
    for group in groups:
        if len(group) == 1:
            joined.append(group[0])
            continue
        notes.append(f"{group[0]['role']}s_joined")
        if group[0]["role"] == "user" and not all(m["content"] for m in group):
            raise RowRefused("empty", "a message of the user is empty")
        whole = {**group[0], "content": "\n\n".join(m["content"] for m in group if m["content"])}
        if calls := [call for m in group for call in m.get("tool_calls", ())]:
            whole["tool_calls"] = calls
        joined.append(whole)
    return joined


def _check(messages: Sequence[Message]) -> None:
    before: Message = {"role": ""}
    for message in messages:
        if message["role"] == "user" and not message["content"]:
            raise RowRefused("empty", "a message of the user is empty")
        if message["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before:
            raise RowRefused("orphan_tool_result", "a tool result stands behind no call of a tool")
        before = message


def _given(messages: Sequence[Message], i: int) -> bool:
    """Whether message ``i`` is context: an assistant's is only as a call whose results follow."""
    if messages[i]["role"] != "assistant":
        return True
    return "tool_calls" in messages[i] and i + 1 < len(messages) and messages[i + 1]["role"] == "tool"


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = [[]]
    for i, message in enumerate(messages):
        if _given(messages, i):
            turns[-1].append(message)
        else:
            turns.append([])
    return [turn for turn in turns if turn]


def _history(messages: Sequence[Message]) -> list[Message]:
    """Everything before the last generation, old answers included."""
    end = next(i for i in range(len(messages), 0, -1) if _given(messages, i - 1))
    history = list(messages[:end])
    if any(m["role"] == "assistant" and not (m["content"] or "tool_calls" in m) for m in history):
        raise RowRefused(
            "empty_answer", "an old answer is empty, so the last turn has no context to stand on"
        )
    return history


# --- words for a person


def visible(text: str) -> bool:
    """Whether ``text`` holds anything that a reader sees."""
    return any(unicodedata.category(c) not in _INVISIBLE_CATEGORIES and not _BLANK.match(c) for c in text)


def _trimmed(text: str) -> str:
    return text.replace("\r\n", "\n").strip() if visible(text) else ""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _clipped(text: str) -> str:
    """At most 60 printable characters: what a hostile file holds must not take over a terminal or a log."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return "".join(c if c.isprintable() else "?" for c in text)


def _shown(text: str) -> str:
    return f'"{_clipped(text)}"'
