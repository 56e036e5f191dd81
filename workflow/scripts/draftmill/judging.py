"""From generated facts to judged rows: what the merge's worker processes do, and nothing else.

Takes a table of generated rows, gives one of MERGED's columns with the verdict beside them. Pure but for
the model folder that it reads once. Must never know other rows: duplicates and earlier turns are the
merge's business.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftmill import __version__
from draftmill.answers import Answer, AnswerReader
from draftmill.arrays import Ints, list_column, list_rows
from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.model import Model
from draftmill.rows import MERGED
from draftmill.tokens import Tokenizer
from draftmill.validation import UNASKED_REASONS, findings, flags, rejection

JUDGED = pa.schema(
    [
        *MERGED,
        ("output_ids", pa.list_(pa.int32())),
        ("completion", pa.string()),  # as the model wrote it
        ("reason", pa.string()),  # null: accepted
        ("detail", pa.string()),
        ("findings", pa.list_(pa.string())),  # whatever the policy says of them
        ("digest", pa.binary()),  # of the answer's text, to find duplicates; null: no answer
        ("retokenised_differs", pa.bool_()),  # null: not measured
        ("fault", pa.string()),  # not null: the row breaks a law, the merge must refuse
    ]
)


class Judge:
    """Judges generated rows against the frozen model and the run's configuration."""

    def __init__(self, model_folder: Path, config: Mapping[str, Any], retokenised_share: float = 1.0) -> None:
        self._retokenised_share = retokenised_share
        self._policy = config["validation"]
        self._model = Model.load(model_folder)
        self._tokenizer = Tokenizer.load(model_folder)
        self._template = ChatTemplate.load(model_folder)
        self._reader = AnswerReader(self._tokenizer, self._model.eos_token_ids, self._template.source)
        self._provenance = {
            "model": self._model.name,
            "model_identity": self._model.identity,
            "revision": self._model.revision,
            "template_hash": self._model.template_hash,
            "tokenizer_hash": self._model.tokenizer_hash,
            "draftmill": __version__,
        }

    def judge(self, generated: pa.Table) -> pa.Table:
        """Judge every row of ``generated``.

        Rows with the schema rows.GENERATED in, as many rows with the schema JUDGED out.
        """
        prompts, outputs = list_rows(generated["prompt_ids"]), list_rows(generated["output_ids"])
        rows = generated.drop_columns(["prompt_ids", "output_ids"]).to_pylist()
        judged = [self._row(row, p, o) for row, p, o in zip(rows, prompts, outputs, strict=True)]
        answered = [at for at, row in enumerate(rows) if row["outcome"] == "answered"]
        measured = [at for at in answered if _chosen(rows[at]["id"], self._retokenised_share)]
        texts = [judged[at]["text"] for at in measured]
        for at, ids in zip(measured, self._tokenizer.encode_batch(texts), strict=True):
            judged[at]["retokenised_differs"] = ids != judged[at]["_whole"]
        rendered = {at: judged[at]["_rendered"] for at in answered if judged[at]["_rendered"] is not None}
        for at, ids in zip(rendered, self._tokenizer.encode_batch(list(rendered.values())), strict=True):
            if ids != prompts[at].tolist():
                judged[at]["fault"] = (
                    f"its prompt_ids ({len(prompts[at])} tokens) are not the rendered prefix ({len(ids)} tokens)"
                )
        pairs = list(zip(prompts, outputs, strict=True))
        lists = {
            "input_ids": list_column([np.concatenate(pair) for pair in pairs], pa.int32()),
            "output_ids": list_column(outputs, pa.int32()),
            "loss_mask": list_column([_mask(p.size, o.size) for p, o in pairs], pa.int8()),
        }
        columns = [
            lists[field.name]
            if field.name in lists
            else pa.array([row[field.name] for row in judged], field.type)
            for field in JUDGED
        ]
        return pa.Table.from_arrays(columns, schema=JUDGED)

    def _row(self, row: dict[str, Any], prompt: Ints, output: Ints) -> dict[str, Any]:
        """Everything of the judged row but the id lists."""
        judged: dict[str, Any] = {
            **{
                name: row[name]
                for name in ("id", "primary_id", "turn_index", "sample", "source", "finish_reason")
            },
            **{name: row[name] for name in ("thinking", "key", "content_hash", "tools", "carried")},
            "status": "success",
            "truncated": row["finish_reason"] == "length",
            "prompt_len": prompt.size,
            "completion_len": output.size,
            "seq_len": prompt.size + output.size,
            "metadata": None,
            "conversations": None,
            "messages": None,
            "text": "",
            "completion": "",
            "flags": [],
            "findings": [],
            "digest": None,
            "retokenised_differs": None,
            "fault": None,
            "reason": None,
            "detail": row["detail"],
            "_whole": None,
            "_rendered": None,
        }
        if row["outcome"] != "answered":
            judged["reason"] = UNASKED_REASONS.get(row["outcome"])
            if judged["reason"] is None:
                judged["fault"] = f"its outcome {row['outcome']!r} is unknown"
            return judged
        sampling = json.loads(row["sampling"])
        messages = json.loads(row["messages"])
        whole = np.concatenate((prompt, output)).tolist()
        answer = self._reader.read(
            whole[: prompt.size], whole[prompt.size :], row["finish_reason"], row["thinking"], sampling,
            tools=row["tools"] is not None,
        )  # fmt: skip
        found = findings(answer, self._policy)
        judged |= {
            "_whole": whole,
            "text": answer.prompt_text + answer.text,
            "completion": answer.text,
            "reason": rejection(found),
            "flags": flags(found),
            "findings": [finding.kind for finding in found],
            "detail": "; ".join(finding.detail for finding in found) or None,
            "digest": hashlib.blake2b(
                (answer.reasoning + "\0" + answer.content).encode(), digest_size=16
            ).digest(),
            "conversations": _conversation(messages, answer),
            "metadata": json.dumps(self._metadata(row, sampling), ensure_ascii=False, sort_keys=True),
        }
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            judged["messages"] = json.dumps([*messages, answer.message()], ensure_ascii=False)
        judged["fault"] = _text_fault(answer)
        try:
            judged["_rendered"] = self._template.render(
                messages,
                json.loads(row["tools"]) if row["tools"] else None,
                row["thinking"] if self._model.template_has_thinking else None,
            )
        except TemplateRefused as refusal:
            judged["fault"] = f"its messages cannot be rendered: {refusal}"
        return judged

    def _metadata(self, row: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        names = (
            "seed",
            "server",
            "engine",
            "started_at",
            "queue_s",
            "latency_s",
            "cached_tokens",
            "attempts",
        )
        return {"sampling": sampling, **{name: row[name] for name in names}, **self._provenance}


def _chosen(row_id: str, share: float) -> bool:
    """Whether a row is in the sample of ``share``; always the same rows."""
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=4).digest(), "big") < share * 2**32


def _text_fault(answer: Answer) -> str | None:
    if answer.parts.text + answer.stop != answer.text:
        return "its decoded completion is not reasoning + content + stop"
    return None


def _conversation(messages: list[dict[str, Any]], answer: Answer) -> list[dict[str, str | None]]:
    """The prefix without any reasoning, and this answer with its own."""
    prefix = [
        {"role": message["role"], "content": message.get("content") or "", "reasoning_content": None}
        for message in messages
    ]
    return [
        *prefix,
        {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning or None},
    ]


def _mask(prompt: int, output: int) -> npt.NDArray[np.int8]:
    mask = np.zeros(prompt + output, dtype=np.int8)
    mask[prompt:] = 1
    return mask


def read_table(stream: IO[bytes]) -> pa.Table | None:
    """The next table that ``write_table`` wrote to the other end of a pipe; None at its end."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    size = int.from_bytes(header, "little")
    return pa.ipc.open_stream(pa.py_buffer(stream.read(size))).read_all()


def write_table(stream: IO[bytes], table: pa.Table) -> None:
    """Writes ``table`` with its length before it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    buffer = sink.getvalue()
    stream.write(buffer.size.to_bytes(8, "little"))
    stream.write(buffer)
    stream.flush()


def main() -> None:
    """Works as one worker: generated tables on stdin, judged tables on stdout, until stdin ends."""
    model_folder, config, retokenised_share = sys.argv[1:]
    judge = Judge(Path(model_folder), json.loads(config), float(retokenised_share))
    while (table := read_table(sys.stdin.buffer)) is not None:
        write_table(sys.stdout.buffer, judge.judge(table))


if __name__ == "__main__":
    main()
