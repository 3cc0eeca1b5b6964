"""What a checkpoint's chat template puts around the messages of a conversation, found by rendering marked ones.

first question reply answer next question ask           the answer to the last question comes behind `ask`
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tx_export import _chat_render
from tx_export._load_text import read_optional, special_tokens
from tx_export.errors import LoadError

__all__ = ["read_chat"]

_log = logging.getLogger("tx_export")

_SECONDS = 120  # that rendering may take; what it computes is bounded by the process itself
_MOST_CHARACTERS = 100_000  # of a template, and of all pieces
_TURNS = 3


class _UnusableError(Exception):
    """A template from which no pieces can be had; the message says why."""


def read_chat(folder: Path) -> dict[str, str] | None:
    """The pieces, or None, with a notice where there is a template that is no use."""
    try:
        template, tokens = _read_template(folder)
        return None if template is None else _pieces(_render(template, tokens, _conversations()))
    except (_UnusableError, LoadError, OSError) as error:
        _log.warning("%s: its chat template is not used: %s", folder, error)
        return None


def _read_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """chat_template.jinja, else that of tokenizer_config.json, or the one that is named default there; and the special
    tokens by their names."""
    config = read_optional(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        if "default" not in named:
            raise _UnusableError("none of them is named default")
        template = named["default"]
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    if not isinstance(template, str | None):
        raise _UnusableError(f"it is a {type(template).__name__}, not a text")
    if len(template or "") > _MOST_CHARACTERS:
        raise _UnusableError(f"it has more than {_MOST_CHARACTERS} characters")
    return template, special_tokens(config)


def _conversations() -> list[list[dict[str, str]]]:
    """Of one question, two and three, each but the last one answered."""
    messages = [{"role": role, "content": _marked(role, turn)} for turn in range(_TURNS) for role in _ROLES]
    return [messages[: 2 * turns + 1] for turns in range(_TURNS)]


_ROLES = ("user", "assistant")


def _marked(role: str, turn: int) -> str:
    """A text that stands nowhere else, with what is easily changed: letters to escape, and the end of a line."""
    return f"{role[0]}{turn} \"a\" <b> & 'c'\n{{d}} {role[0]}{turn}"


def _render(template: str, tokens: dict[str, str], conversations: list[list[dict[str, str]]]) -> list[str]:
    """In a process of its own, for a template can take any time and memory."""
    question = json.dumps({"template": template, "tokens": tokens, "conversations": conversations})
    command = [sys.executable, "-P", _chat_render.__file__]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS
        )
        answer: Any = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise _UnusableError(f"rendering it took more than {_SECONDS} s") from error
    except ValueError as error:
        raise _UnusableError("rendering it took too much time or memory") from error
    if "error" in answer:
        raise _UnusableError(answer["error"])
    if sum(map(len, answer["texts"])) > _MOST_CHARACTERS:
        raise _UnusableError(f"what it writes has more than {_MOST_CHARACTERS} characters")
    texts: list[str] = answer["texts"]
    return texts


def _pieces(texts: Sequence[str]) -> dict[str, str]:
    """Those of the first two conversations; all have to come out when they are put together."""
    first, ask = _split(texts[0], 1)
    _, reply, following, _ = _split(texts[1], 2)
    chat = {"first": first, "reply": reply, "next": following, "ask": ask}
    for turns, text in enumerate(texts, 1):
        if _put_together(chat, turns) != text:
            raise _UnusableError("what it puts around a message depends on more than the messages before")
    return chat


def _split(text: str, turns: int) -> list[str]:
    """What stands around the messages."""
    parts, rest = [], text
    for message in _conversations()[turns - 1]:
        part, found, rest = rest.partition(message["content"])
        if not found:
            raise _UnusableError("it changes messages, or leaves some out")
        parts.append(part)
    return [*parts, rest]


def _put_together(chat: dict[str, str], turns: int) -> str:
    text = chat["first"] + _marked("user", 0)
    for turn in range(1, turns):
        text += chat["reply"] + _marked("assistant", turn - 1) + chat["next"] + _marked("user", turn)
    return text + chat["ask"]
