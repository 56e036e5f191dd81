"""Chat templates render as they were meant, in a sandbox, and never read the clock."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.frozen_model import THINKING, freeze

from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.errors import UserError

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, date: str | None = None, **how: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, date).render(messages, **how)


def test_messages_special_tokens_and_the_generation_prompt() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>user:hello</s>>"
    assert render(source, add_generation_prompt=False) == "<s>user:hello</s>"


def test_white_space_is_trimmed_as_transformers_does() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_loop_controls_work() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "02"


def test_json_stands_as_it_is_written() -> None:
    tools = [{"name": "größe <b>", "parameters": {"z": 1, "a": 2}}]
    assert (
        render("{{ tools | tojson }}", tools=tools)
        == '[{"name": "größe <b>", "parameters": {"z": 1, "a": 2}}]'
    )
    assert json.loads(render("{{ tools | tojson(indent=2) }}", tools=tools)) == tools


def test_json_takes_the_arguments_that_transformers_takes() -> None:
    tools = [{"z": "ö", "a": 2}]
    assert render("{{ tools | tojson(separators=(',', ':')) }}", tools=tools) == '[{"z":"ö","a":2}]'
    assert render("{{ tools | tojson(sort_keys=true) }}", tools=tools) == '[{"a": 2, "z": "ö"}]'
    assert render("{{ tools | tojson(true) }}", tools=tools) == '[{"z": "\\u00f6", "a": 2}]'
    assert render("{{ tools | tojson(false, 1) }}", tools=tools) == '[\n {\n  "z": "ö",\n  "a": 2\n }\n]'


def test_no_tools_are_none_for_the_template() -> None:
    assert render("{{ tools is none }}") == render("{{ tools is none }}", tools=[]) == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).__init__ }}",
        "{{ raise_exception.__globals__['json'].codecs }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__globals__.datetime }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ ('%s' | format(messages)).__class__.mro() }}",
        "{{ self.__init__.__globals__.sys }}",
    ],
)
def test_the_sandbox_refuses_attribute_tricks(source: str) -> None:
    """Jinja either says so, or takes the name for one that is not there."""
    try:
        text = render(source)
    except TemplateRefused as refusal:
        assert "unsafe" in str(refusal) or "undefined" in str(refusal)
    else:
        assert text == ""


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}", "{% set _ = messages.clear() %}"],
)
def test_a_template_cannot_change_the_messages(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(TemplateRefused):
        render(source, messages)
    assert messages == HELLO


def test_a_refusal_of_the_template_is_its_own_sentence() -> None:
    with pytest.raises(TemplateRefused, match=r"^only one system message$"):
        render("{{ raise_exception('only one system message') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].content }}",
        "{{ '{1}'.format('a') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ nothing.at.all }}",
        "{{ 'a' | tojson(indent='x', more=1) }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_refuses_the_conversation_only(source: str) -> None:
    with pytest.raises(TemplateRefused, match="cannot render"):
        render(source)


def test_broken_jinja_is_a_sentence_about_the_model() -> None:
    with pytest.raises(UserError, match=r"not valid Jinja .* set model\.chat_template"):
        render("{% if %}")


# --- the clock


def test_a_date_without_template_date_is_refused() -> None:
    with pytest.raises(UserError, match=r"set model\.template_date"):
        render("Today is {{ strftime_now('%d %B %Y') }}.")


def test_the_date_is_the_configured_one() -> None:
    source = "Today is {{ strftime_now('%d %B %Y') }}."
    assert render(source, date="2026-07-01") == "Today is 01 July 2026."


def test_a_template_that_asks_only_sometimes_is_refused_only_then() -> None:
    source = "{% if tools %}{{ strftime_now('%Y') }}{% endif %}x"
    assert render(source) == "x"
    with pytest.raises(UserError, match="template_date"):
        render(source, tools=[{"name": "t"}])


def test_a_day_that_does_not_exist_is_a_sentence_about_the_config() -> None:
    with pytest.raises(UserError, match=r"model\.template_date 2026-02-31 is no day"):
        render("{{ strftime_now('%Y') }}", date="2026-02-31")


@pytest.mark.parametrize("name", ["now()", "datetime.now()", "time.time()", "namespace(a=1).b.c", "random()"])
def test_there_is_no_other_way_to_the_clock_or_to_chance(name: str) -> None:
    with pytest.raises(TemplateRefused):
        render("{{ " + name + " }}")


# --- masks and thinking


def test_a_generation_block_renders_what_stands_inside() -> None:
    marked = "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}|{% endgeneration %}\n{% else %}\n{{ m.content }}\n{% endif %}\n{% endfor %}"
    plain = marked.replace("{% generation %}\n", "").replace("{% endgeneration %}\n", "")
    talk = [*HELLO, {"role": "assistant", "content": "hi"}]
    assert render(marked, talk) == render(plain, talk)
    assert "hi|" in render(marked, talk)


def test_a_generation_block_sees_and_keeps_the_loop_variables() -> None:
    source = "{% for m in messages %}{% generation %}{% set n = loop.index %}{{ n }}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(source) == "1hello"


def test_an_open_generation_block_is_broken_jinja() -> None:
    with pytest.raises(UserError, match="not valid Jinja"):
        render("{% generation %}x")


def test_the_thinking_switch(tmp_path: Path) -> None:
    template = ChatTemplate.load(freeze(tmp_path, template=THINKING))
    assert template.has_thinking and not ChatTemplate("{{ messages }}", {}).has_thinking
    default, on, off = (template.render(HELLO, thinking=thinking) for thinking in (None, True, False))
    assert default == on and off == on + "<think></think>"


def test_no_switch_leaves_the_name_undefined() -> None:
    source = "{{ enable_thinking is defined }}"
    assert render(source) == "False"
    assert render(source, thinking=False) == render(source, thinking=True) == "True"
