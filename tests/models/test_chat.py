"""Chat templates in pieces, against what transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tx_export import _chat
from tx_export._chat import read_chat

from .checkpoints import save_tokenizer

_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are kind<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content.strip() "
    "+ ' [/INST]' }}{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a:{{ m.content }}{% endgeneration %}"
    "{% else %}u:{{ m.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}\n{% endfor %}a:"
)
_TEMPLATES = {"chatml": _CHATML, "llama": _LLAMA, "thinking": _THINKING, "marked": _MARKED}
_TALK = ("What is it?", 'A <film> & "more".', "Is it\ngood?", "It's {{ fine }}.", "Bye")


def _save(folder: Path, template: Any, **config: Any) -> Path:
    save_tokenizer(folder, 0)
    file = folder / "tokenizer_config.json"
    tokens = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": template}
    file.write_text(json.dumps(json.loads(file.read_text()) | tokens | config))
    return folder


def _put_together(chat: dict[str, str], messages: tuple[str, ...]) -> str:
    text = chat["first"] + messages[0]
    for answer, question in zip(messages[1::2], messages[2::2], strict=True):
        text += chat["reply"] + answer + chat["next"] + question
    return text + chat["ask"]


@pytest.mark.parametrize("name", _TEMPLATES)
def test_the_pieces_put_together_are_what_transformers_renders(name: str, tmp_path: Path) -> None:
    _save(tmp_path, _TEMPLATES[name])
    chat = read_chat(tmp_path)
    assert chat is not None
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for turns in (1, 3, 5):
        roles = ("user", "assistant", "user", "assistant", "user")[:turns]
        messages = [{"role": role, "content": text} for role, text in zip(roles, _TALK, strict=False)]
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert _put_together(chat, _TALK[:turns]) == expected


def test_a_default_system_message_stands_before_the_first_question(tmp_path: Path) -> None:
    assert read_chat(_save(tmp_path, _CHATML)) == {
        "first": "<|im_start|>system\nYou are kind<|im_end|>\n<|im_start|>user\n",
        "reply": "<|im_end|>\n<|im_start|>assistant\n",
        "next": "<|im_end|>\n<|im_start|>user\n",
        "ask": "<|im_end|>\n<|im_start|>assistant\n",
    }


def test_of_several_templates_the_default_one_is_read_and_a_file_beside_wins(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": _LLAMA}]
    chat = read_chat(_save(tmp_path, several))
    assert chat is not None and chat["first"] == "<s>[INST] "
    (tmp_path / "chat_template.jinja").write_text(_CHATML)
    chat = read_chat(tmp_path)
    assert chat is not None and chat["next"] == "<|im_end|>\n<|im_start|>user\n"


def test_no_template_is_no_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path, 0)
    assert read_chat(tmp_path) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat(tmp_path) is None
    assert not caplog.messages


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError: unexpected '}'"),
        ("{{ raise_exception('Only tools here') }}", "ValueError: Only tools here"),
        ("{{ strftime_now('%d %b') }}{{ messages[0].content }}", "ValueError: it writes today's date"),
        ("{{ messages[0].content }}", "it changes messages, or leaves some out"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "it changes messages, or leaves some out"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", "it changes messages, or leaves some out"),
        (
            "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",
            "what it puts around a message depends on more than the messages before",
        ),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append' of 'list' object is unsafe."),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment specified"),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'a' * 200000 }}{% for m in messages %}{{ m.content }}{% endfor %}", "has more than 100000 characters"),
        ("a" * 200_000, "it has more than 100000 characters"),
        ([{"name": "tool_use", "template": _CHATML}], "none of them is named default"),
        ({"default": _CHATML}, "it is a dict, not a text"),
    ],
)
def test_a_template_of_no_use_is_told_and_the_checkpoint_still_loads(
    template: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_chat(_save(tmp_path, template)) is None
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: its chat template is not used: ")
    assert reason in message


def test_a_template_that_never_ends_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chat, "_SECONDS", 1)
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    assert read_chat(_save(tmp_path, loops)) is None
    assert caplog.messages == [f"{tmp_path}: its chat template is not used: rendering it took more than 1 s"]
