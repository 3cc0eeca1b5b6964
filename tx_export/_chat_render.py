"""Renders conversations by a chat template: jinja2, sandboxed, in a process with limits. JSON in, JSON out.

In: {"template": s, "tokens": {name: s}, "conversations": [[{"role": s, "content": s}]]}. Out: {"texts": [s]}, or
{"error": s}. Templates see what transformers shows them, but for today's date.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, NoReturn

__all__ = ["main"]

_SECONDS, _BYTES = 10, 1 << 30


def main() -> None:
    _limit()
    question = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"texts": _texts(**question)}
    except Exception as error:  # a template may do anything that raises
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    json.dump(answer, sys.stdout)


def _limit() -> None:
    """Processor time and memory of this process."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))


def _texts(template: str, tokens: dict[str, str], conversations: list[Any]) -> list[str]:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what is learned in training; here it is what stands in it."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _refuse_date}
    compiled = environment.from_string(template)
    given = {**tokens, "tools": None, "documents": None, "add_generation_prompt": True}
    return [compiled.render(messages=messages, **given) for messages in conversations]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As transformers has it: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: object = "") -> NoReturn:
    raise ValueError(str(message))


def _refuse_date(_format: object = "") -> NoReturn:
    raise ValueError("it writes today's date, and an artifact knows none")


if __name__ == "__main__":
    main()
