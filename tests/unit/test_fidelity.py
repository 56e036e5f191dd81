"""Token fidelity: rendering prefix and answer, and masking, gives exactly the ids that were sent and sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.generated_rows import PROSE, Run

from draftmill.chat import ChatTemplate
from draftmill.judging import Judge
from draftmill.rows import GENERATED

# As Qwen3's: the history without reasoning, the answer always with a block of it, empty where thinking is off.
QWEN3 = """{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}{%- set reasoning = message.reasoning_content or '' -%}
{%- if not reasoning and '</think>' in content and message.role == 'assistant' -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > last.query -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

# As Llama 3's: strips every content, knows no thinking.
LLAMA3 = """{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

# As Mistral's: no marker before an answer, the system text inside the first question, a blank that is the model's.
MISTRAL = """{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' -}}
{%- else -%}{{- ' ' + message.content | trim + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}"""

# As QwQ's and DeepSeek-R1's: the prompt opens the reasoning, and the template drops it from every answer.
OPENED = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""

CASES = {
    # template, thinking, before the answer, whether the template renders a whole conversation to what was sampled
    "qwen3, thinking": (QWEN3, True, "<think>\nLet me see.\n</think>\n\n", True),
    "qwen3, not thinking": (QWEN3, False, "", True),
    "llama3": (LLAMA3, False, "", True),
    "mistral": (MISTRAL, False, " ", True),
    "opened by the prompt": (OPENED, True, "Let me see.\n</think>\n\n", False),
}

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
# prompts come trimmed (conversations.py); what a tag or control token spells is text like any other
question = st.one_of(words, st.sampled_from(["what is <think>?", "<|im_end|>", "a\n\nb", "\u2028x\u200d"]))
question = question.map(str.strip).filter(bool)


class Models:
    """A run and its judge for each kind of model, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Run, Judge]] = {}

    def __getitem__(self, case: str) -> tuple[Run, Judge]:
        if case not in self._made:
            template, thinking, *_ = CASES[case]
            run = Run(self._folder / str(len(self._made)), {"prompts": {"thinking": thinking}})
            (run.model / "chat_template.jinja").write_text(template, encoding="utf-8")
            run.template = ChatTemplate.load(run.model)
            self._made[case] = run, Judge(run.model, run.config)
        return self._made[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def judged(
    models: Models, case: str, messages: list[dict[str, str]], answer: str
) -> tuple[Run, dict[str, Any]]:
    """The merged row of an answer that a model of this kind gave, as the merge's workers make it."""
    _, thinking, before, _ = CASES[case]
    run, judge = models[case]
    run.rows.clear()
    run.add("a", before + answer, thinking=thinking, messages=messages)
    (row,) = judge.judge(pa.Table.from_pylist(run.rows, schema=GENERATED)).to_pylist()
    assert row["fault"] is None
    assert row["input_ids"] == [*run.rows[0]["prompt_ids"], *run.rows[0]["output_ids"]]
    return run, row


def chat(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages as an export gives them."""
    return [{k: v for k, v in message.items() if v is not None} for message in row["conversations"]]


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(question, words), min_size=1, max_size=3), st.booleans(), words)
def test_prefix_and_answer_give_the_ids_sent_and_sampled(
    models: Models, case: str, talk: list[tuple[str, str]], system: bool, answer: str
) -> None:
    """What a trainer does that renders the prefix, tokenises it, appends the answer's text and masks the prefix."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for asked, answered in talk:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    run, row = judged(models, case, messages[:-1], answer)
    prefix = run.template.render(chat(row)[:-1], thinking=row["thinking"])
    sent = run.tokenizer.encode(prefix)
    assert row["input_ids"][: len(sent)] == sent
    assert row["loss_mask"] == [0] * len(sent) + [1] * (len(row["input_ids"]) - len(sent))
    sampled = run.tokenizer.encode(row["text"][len(prefix) :])
    assert row["text"].startswith(prefix)
    assert (sent + sampled == row["input_ids"]) != row["retokenised_differs"]


@pytest.mark.parametrize("case", [case for case, (*_, whole) in CASES.items() if whole])
def test_the_whole_conversation_renders_to_the_ids_sent_and_sampled(models: Models, case: str) -> None:
    """What a trainer does that hands `conversations` to the template as they are."""
    messages = [
        {"role": "user", "content": "first?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "second?"},
    ]
    for history in (messages[:1], messages):
        run, row = judged(models, case, history, PROSE.strip())
        whole = run.template.render(chat(row), thinking=row["thinking"], add_generation_prompt=False)
        assert run.tokenizer.encode(whole.removesuffix("\n")) == row["input_ids"]
        assert row["text"] == whole.removesuffix("\n")


def test_a_template_that_drops_the_reasoning_is_why_input_ids_are_exported(models: Models) -> None:
    run, row = judged(models, "opened by the prompt", [{"role": "user", "content": "first?"}], PROSE.strip())
    assert row["conversations"][-1]["reasoning_content"] == "Let me see."
    whole = run.template.render(chat(row), thinking=True, add_generation_prompt=False)
    assert "Let me see." in row["text"] and "Let me see." not in whole
    assert json.loads(row["metadata"])["template_hash"]
