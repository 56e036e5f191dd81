"""The chat template: messages in, the prompt text out, exactly as the target model was trained.

Templates come with models and are foreign code, so they render in Jinja's sandbox. Nothing here
reads the clock: a template that asks for today's date gets ``model.template_date``, or is refused,
because a prompt that changes overnight would make every finished answer worthless.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from draftmill.errors import UserError


class TemplateRefused(Exception):
    """The template refuses these messages; the text is its own sentence."""


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` (Hugging Face's mask marker) and renders what stands inside."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers' chat templates, its arguments in the same order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(sentence: str) -> None:
    raise TemplateRefused(sentence)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens it may name."""

    source: str
    special_tokens: dict[str, str]
    date: str | None = None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Reads the frozen ``chat_template.jinja`` and ``model.json`` of ``folder``."""
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(source, facts["special_tokens"], facts["template_date"])

    @property
    def has_thinking(self) -> bool:
        """Whether the template has a switch for thinking."""
        return "enable_thinking" in self.source

    def check(self) -> None:
        """UserError if the template is no valid Jinja."""
        _ = self._compiled

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text for ``messages``.

        ``thinking`` is handed over as ``enable_thinking``; None leaves the template's default.
        Raises TemplateRefused with the reason when these messages cannot be rendered.
        """
        names: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **names,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            LookupError,
            ArithmeticError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as fault:
            raise TemplateRefused(f"the chat template cannot render this conversation: {fault}") from fault

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _fixed_clock(self.date)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as fault:
            raise UserError(
                f"The chat template is not valid Jinja ({fault}); correct it, or set model.chat_template."
            ) from fault


def _fixed_clock(date: str | None) -> Callable[[str], str]:
    def strftime_now(layout: str) -> str:
        if date is None:
            raise UserError(
                "The chat template writes today's date into every prompt; "
                "set model.template_date (YYYY-MM-DD), so that the prompts stay the same tomorrow."
            )
        try:
            day = datetime.date.fromisoformat(date)
        except ValueError as fault:
            raise UserError(f"model.template_date {date} is no day of the calendar ({fault}).") from fault
        return day.strftime(layout)

    return strftime_now
