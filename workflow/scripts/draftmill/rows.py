"""The tables after generation: their schemas, each in one place.

Knows column names and Arrow types (plain lists and strings only, never large ones, so that every reader
takes them). Must never know how a row comes about.
"""

from __future__ import annotations

import pyarrow as pa

MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("reasoning_content", pa.string()),
    ]
)

# One row per turn to generate: facts only. `outcome`: answered | refused | poison | unasked (an earlier turn of
# the conversation was rejected). `messages`, `tools`, `sampling` and `carried` are JSON.
GENERATED = pa.schema(
    [
        ("id", pa.string()),
        ("primary_id", pa.string()),
        ("turn_index", pa.int32()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("content_hash", pa.string()),
        ("key", pa.string()),
        ("outcome", pa.string()),
        ("thinking", pa.bool_()),
        ("messages", pa.string()),  # exactly what was rendered
        ("tools", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("detail", pa.string()),
        ("seed", pa.int64()),
        ("sampling", pa.string()),  # every parameter sent
        ("max_tokens", pa.int32()),
        ("started_at", pa.float64()),  # unix s
        ("queue_s", pa.float64()),
        ("latency_s", pa.float64()),
        ("server", pa.string()),
        ("engine", pa.string()),
        ("cached_tokens", pa.int32()),
        ("attempts", pa.int32()),
        ("carried", pa.string()),
    ]
)

# One row per accepted generation. `messages` and `tools` are JSON, and only there where `conversations`
# cannot say it all (tool calls); `content_hash` names the conversation for the validation split.
MERGED = pa.schema(
    [
        ("id", pa.string()),
        ("primary_id", pa.string()),
        ("turn_index", pa.int32()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("conversations", pa.list_(MESSAGE)),
        ("text", pa.string()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),
        ("thinking", pa.bool_()),
        ("prompt_len", pa.int32()),
        ("completion_len", pa.int32()),
        ("seq_len", pa.int32()),
        ("flags", pa.list_(pa.string())),
        ("metadata", pa.string()),
        ("key", pa.string()),
        ("content_hash", pa.string()),
        ("tools", pa.string()),
        ("messages", pa.string()),
        ("carried", pa.string()),
    ]
)

# One row per rejected generation; `text` is the completion as the model wrote it.
REJECTED = pa.schema(
    [
        ("id", pa.string()),
        ("primary_id", pa.string()),
        ("turn_index", pa.int32()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("text", pa.string()),
        ("output_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("key", pa.string()),
    ]
)

# A training row as a line of train.jsonl: no column of it is ever null or an empty list,
# because readers take a column's type from the first rows they see.
JSONL_COLUMNS = (
    "id", "primary_id", "turn_index", "input_ids", "loss_mask", "conversations", "text", "status", "finish_reason",
    "truncated", "thinking", "prompt_len", "completion_len", "seq_len", "metadata",
)  # fmt: skip
