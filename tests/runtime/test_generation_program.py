"""Continuations: `Model.generate`, and what `run.py` makes of them. The reference is the table of words."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tx_export import _commands_run, cli, runtime
from tx_export.runtime import ArtifactError, Model, TxExportError, UsageError, main

from .artifact import edit_manifest, make_artifact, seal
from .continuing import CHAT, IDS, LIMIT, make_continuing

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_continuing(tmp_path_factory.mktemp("generation") / "a", chat=CHAT)


@pytest.fixture
def model(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("classifier") / "a")


# ---- As a module


def test_each_text_is_continued_in_order(model: Model) -> None:
    texts = ["the capital", "one", "the capital of france is", "paris"]
    counted = " two three one two three one two three one two three one two three one two three one two three one two"
    expected = [" of france is paris .", f"{counted}", " paris .", " ."]
    assert model(texts) == model.generate(texts) == [{"text": text} for text in expected]
    assert list(model.stream(texts)) == [{"text": text} for text in expected]
    assert model.generate([]) == []


def test_a_text_among_others_is_continued_as_it_is_alone(model: Model) -> None:
    """Each up to the limit, which leaves more to shorter ones; and more of them than are read together."""
    texts = [" ".join(["one"] * count) for count in (1, 20, 3, 3, 7, *range(1, 12))]
    together = model.generate(texts)
    assert together == [model.generate([text])[0] for text in texts]
    assert [len(result["text"].split()) for result in together] == [LIMIT - 1 - len(text.split()) for text in texts]


def test_the_pieces_of_a_stream_are_the_continuation(model: Model) -> None:
    pieces = list(model.stream_text("the capital of"))
    assert len([piece for piece in pieces if piece]) > 2
    assert "".join(pieces) == model.generate(["the capital of"])[0]["text"] == " france is paris ."


def test_the_continuation_begins_with_the_space_behind_the_text(model: Model) -> None:
    assert model.generate(["the"], max_new_tokens=1) == [{"text": " capital"}]


def test_an_empty_text_begins_with_the_first_token(model: Model) -> None:
    assert model.generate([""], max_new_tokens=3) == [{"text": "the capital of"}]


@pytest.mark.parametrize("options", [{}, {"beams": 2}])
def test_a_continuation_ends_before_a_stop(model: Model, options: dict[str, int]) -> None:
    assert model.generate(["the", "one"], stop=[" is", "ree"], **options) == [
        {"text": " capital of france"},
        {"text": " two th"},
    ]
    assert "".join(model.stream_text("one", stop=["ree"], **options)) == " two th"


def test_an_artifact_says_how_it_is_continued_and_options_win(tmp_path: Path) -> None:
    folder = make_continuing(tmp_path / "a", beams=2, no_repeat_ngram=2, suppressed=[IDS["there"]], min_new_tokens=4)
    model = Model(folder)
    assert model.generate(["one"], beams=1, max_new_tokens=9, min_new_tokens=0)[0]["text"].startswith(" two three one")
    # An n-gram of two may not come twice, so that after one, two three, the cycle is left.
    assert model.generate(["one"], beams=1, max_new_tokens=4)[0]["text"].split()[:3] == ["two", "three", "one"]
    assert model.generate(["one"], beams=1, max_new_tokens=4)[0]["text"].split()[3] != "two"
    assert model.generate(["one"], beams=1, no_repeat_ngram=0, max_new_tokens=4)[0]["text"].split()[3] == "two"
    assert model.generate(["one"], temperature=1.0, max_new_tokens=4)  # drawn, and so without beams
    with pytest.raises(UsageError, match="beams"):
        model.generate(["one"], temperature=1.0, beams=2)


def test_what_is_drawn_is_as_the_seed_says(model: Model) -> None:
    drawn = [model.generate(["one"], temperature=5.0, seed=seed, max_new_tokens=9)[0]["text"] for seed in range(4)]
    assert drawn == [
        model.generate(["one"], temperature=5.0, seed=seed, max_new_tokens=9)[0]["text"] for seed in range(4)
    ]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3}, "max_tokens: no option of a generation; known: stop, max_new_tokens, temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is not a whole number of at least 1"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number of at least 0"),
        ({"top_k": 3}, "top_k, top_p and min_p need a temperature above 0"),
        ({"stop": "end"}, "stop: expected a list of texts, none of them empty, not 'end'"),
        ({"stop": [""]}, "stop: expected a list of texts, none of them empty"),
    ],
)
def test_an_option_out_of_its_range_is_a_usage_error(model: Model, options: dict[str, Any], message: str) -> None:
    for call in (lambda: model.generate(["one"], **options), lambda: model.stream_text("one", **options)):
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["one", "one " * LIMIT], {}, f"text 1: has {LIMIT + 1} tokens; the limit, continuation included, is {LIMIT}"),
        (["one", "one", "one two"], {"max_new_tokens": LIMIT - 2}, f"text 2: 3 tokens and {LIMIT - 2} new ones are"),
        (["one", ("one", "two")], {}, "text 1: a pair given; what is continued is one text"),
        (["one", 2], {}, "text 1: expected a str or a pair of them, not int"),
        ("one", {}, "texts: expected a list of texts, not one str"),
    ],
)
def test_a_text_that_cannot_be_continued_is_named(
    model: Model, texts: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(TxExportError) as caught:
        model.generate(texts, **options)
    assert str(caught.value).startswith(message)


def test_what_continues_no_text_says_so(classifier: Path) -> None:
    for call in (Model(classifier).generate, lambda texts: Model(classifier).stream_text(texts[0])):
        with pytest.raises(UsageError, match="continues no text; its task is text-classification"):
            call(["good"])


def test_what_has_no_tokenizer_takes_arrays_only(tmp_path: Path) -> None:
    folder = make_continuing(tmp_path / "a")
    edit_manifest(folder, lambda manifest: {key: value for key, value in manifest.items() if key != "text"})
    with pytest.raises(TxExportError, match="has no tokenizer; it takes arrays"):
        Model(folder)(["one"])
    assert Model(folder).run_arrays({"input_ids": [[IDS["one"]]]})["logits"].argmax() == IDS["two"]


# ---- The manifest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": None}, "key 'cache' is missing or not a dict"),
        ({"cache": {"layers": 1, "heads": 1, "head_dim": 1}}, "key 'max_length' is missing or not a int"),
        ({"cache": {"layers": -1, "heads": 1, "head_dim": 1, "max_length": 9}}, "key 'layers' is -1; allowed 0.."),
        ({"cache": {"layers": 1, "heads": 0, "head_dim": 1, "max_length": 9}}, "key 'heads' is 0; allowed 1.."),
        ({"cache": {"layers": 1, "heads": 1, "head_dim": 1, "max_length": 2**80}}, "key 'max_length' is 1208925"),
        ({"eos": 2}, "key 'eos' is missing or not a list"),
        ({"eos": ["2"]}, "has the id '2'; allowed 0.."),
        ({"eos": [True]}, "has the id True; allowed 0.."),
        ({"suppressed": [10**9]}, "has the id 1000000000; allowed 0.."),
        ({"bos": -1}, "has the id -1; allowed 0.."),
        ({"start": "x"}, "key 'start' is missing or not a int"),
        ({"beams": 0}, "key 'beams' is 0; allowed 1.."),
        ({"beams": True}, "key 'beams' is missing or not a int"),
        ({"length_penalty": "1"}, "key 'length_penalty' is missing or not a float"),
        ({"early_stopping": 1}, "key 'early_stopping' is missing or not a bool"),
        ({"no_repeat_ngram": -2}, "key 'no_repeat_ngram' is -2; allowed 0.."),
        ({"chat": "x"}, "key 'chat' is missing or not a dict"),
        ({"chat": CHAT | {"ask": 3}}, "key 'chat' has no texts first, reply, next, ask"),
    ],
)
def test_a_manifest_with_a_wrong_generation_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_continuing(tmp_path / "a", **changes)
    with pytest.raises(ArtifactError) as caught:
        Model(folder)
    assert message in str(caught.value)


def test_what_a_manifest_leaves_open_is_a_plain_generation(tmp_path: Path) -> None:
    folder = make_continuing(tmp_path / "a", eos=None, beams=None, suppressed=None, chat=None)
    assert Model(folder).generate(["the"], max_new_tokens=2) == [{"text": " capital of"}]


def test_a_graph_that_has_no_cache_is_told_when_a_text_comes(tmp_path: Path, classifier: Path) -> None:
    folder = make_continuing(tmp_path / "a")
    (folder / "model.onnx").write_bytes((classifier / "model.onnx").read_bytes())
    with pytest.raises(ArtifactError, match="a graph that continues no text"):
        Model(seal(folder)).generate(["one"])


# ---- As a program


class _Written(io.StringIO):
    """What is written, and where it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def test_the_continuation_of_a_single_argument_comes_in_pieces(folder: Path) -> None:
    out = _Written()
    runtime.run(folder, ["the capital"], out=out)
    assert out.getvalue() == " of france is paris .\n"
    assert len(set(out.flushed)) > 3


def test_several_texts_get_a_line_each_and_json_an_object_each(folder: Path, capsys: Capture) -> None:
    assert main(["the capital", "paris"], folder) == 0
    assert capsys.readouterr().out == " of france is paris .\n .\n"
    assert main(["the capital", "--json"], folder) == 0
    assert capsys.readouterr().out == '{"text": " of france is paris ."}\n'


def test_piped_lines_get_a_line_each(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "texts.txt").write_text("one\n\nthe\n")
    assert main(["--input", str(tmp_path / "texts.txt"), "--max-new-tokens", "2"], folder) == 0
    assert capsys.readouterr().out == " two three\nthe capital\n capital of\n"


def test_options_reach_the_generation(folder: Path, capsys: Capture) -> None:
    given = "--max-new-tokens 7 --temperature 9 --top-k 3 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 5"
    assert main(["one", *given.split(), "--json"], folder) == 0
    options = {"max_new_tokens": 7, "temperature": 9.0, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    assert json.loads(capsys.readouterr().out) == Model(folder).generate(["one"], repetition_penalty=1.1, **options)[0]
    assert main(["one", "--beams", "2", "--length-penalty", "0.5", "--stop", "one", "--stop", "ree"], folder) == 0
    assert capsys.readouterr().out == " two th\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--top-p", "2"], "top_p: 2.0 is not a number above 0 and up to 1"),
        (["one", "--seed", "x"], "argument --seed: invalid int value: 'x'; see --help"),
        (["one", "--interactive"], "--interactive reads its lines from standard input; it takes no other text"),
        (["--interactive", "--self-test"], "--self-test and --bench take no text"),
    ],
)
def test_wrong_options_end_with_2(arguments: list[str], message: str, folder: Path, capsys: Capture) -> None:
    assert main(arguments, folder) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("option", [["--seed", "1"], ["--stop", "x"], ["--max-new-tokens", "3"], ["--interactive"]])
def test_an_option_of_a_generation_is_refused_where_there_is_none(
    option: list[str], classifier: Path, capsys: Capture
) -> None:
    texts = [] if option == ["--interactive"] else ["good"]
    assert main([*texts, *option], classifier) == 2
    message = f"error: {option[0]}: {classifier} continues no text; its task is text-classification\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_text_that_is_too_long_ends_with_1_and_its_number(folder: Path, capsys: Capture) -> None:
    assert main(["one", "one " * 40], folder) == 1
    assert capsys.readouterr().err.startswith("error: text 1: has 41 tokens; the limit")


def test_tx_export_run_takes_the_options_of_run_py_and_prints_the_same(folder: Path, capsys: Capture) -> None:
    ours = {name for option in _commands_run.run.params for name in option.opts}
    theirs = set(runtime._parser()._option_string_actions) - {"-h", "--help", "--batch", "--tokens"}
    assert theirs - {"--self-test", "--bench"} <= ours
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(folder), "one", "--max-new-tokens", "5", "--stop", "one"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == " two three \n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(folder), "one", "--interactive"])
    assert ended.value.code == 2


def test_nobody_who_reads_on_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} {folder / 'run.py'} one | head -c 3"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, " tw", "")


# ---- Conversations


def _typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape"))))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What the generator is given, as it is given."""
    seen: list[list[int]] = []
    stream = runtime._import_generate().Generator.stream

    def watched(self: Any, prompt: list[int], options: Any) -> Iterator[int]:
        seen.append(list(prompt))
        return iter(stream(self, prompt, options))

    monkeypatch.setattr(runtime._import_generate().Generator, "stream", watched)
    return seen


def _ids(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def test_answers_have_all_that_was_said_in_mind(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _typed(monkeypatch, " one two \nhello\n\nnever read\n")
    assert main(["--interactive"], folder) == 0
    assert capsys.readouterr() == ("hello there you\n" * 2, "")
    first = "<s> <user> one two <end> <bot>"
    assert prompts == [_ids(first), _ids(f"{first} hello there you <end> <user> hello <end> <bot>")]


def test_of_a_longer_conversation_only_what_is_new_is_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sizes = runtime._import_generate()._Batch, list[int]()
    read = batch.read

    def watched(self: Any, ids: np.ndarray) -> np.ndarray:
        sizes.append(ids.shape[1])
        return np.asarray(read(self, ids))

    monkeypatch.setattr(batch, "read", watched)
    say = model.converse(max_new_tokens=5)
    assert ["".join(say("one")), "".join(say("two"))] == ["hello there you"] * 2
    assert sizes == [5, 1, 5, 1]  # all of a prompt of 5, then single tokens, bound once; again 5, of 13


def test_json_of_a_conversation_is_an_object_for_each_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _typed(monkeypatch, "one\ntwo")
    assert main(["--interactive", "--json", "--max-new-tokens", "2"], folder) == 0
    assert capsys.readouterr().out == '{"text": "hello there"}\n' * 2


def test_special_tokens_that_a_message_spells_are_plain_text(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _typed(monkeypatch, "one <user>\n")
    assert main(["--interactive"], folder) == 0
    assert prompts == [_ids("<s> <user> one < user > <end> <bot>")]


def test_the_oldest_turns_are_forgotten_where_the_limit_is_reached(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _typed(monkeypatch, "one\ntwo\nthree\n")
    assert main(["--interactive", "--max-new-tokens", "5"], folder) == 0
    told = "notice: the conversation is longer than the limit; its oldest turns are left out\n"
    assert capsys.readouterr() == ("hello there you\n" * 3, told)
    assert prompts[-1] == _ids("<s> <user> two <end> <bot> hello there you <end> <user> three <end> <bot>")


def test_a_line_that_is_too_long_is_told_and_the_next_one_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _typed(monkeypatch, f"{'one ' * 40}\ntwo\n")
    assert main(["--interactive"], folder) == 0
    out, err = capsys.readouterr()
    assert out == "hello there you\n"
    assert err.startswith("error: text 0: has 44 tokens; the limit, continuation included, is 24")


def test_a_terminal_shows_where_a_line_is_awaited(folder: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"one\n\n")
    command = [sys.executable, str(folder / "run.py"), "--interactive"]
    assert subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, timeout=120).returncode == 0
    shown = os.read(ours, 4096).decode()
    assert shown.count("> ") == 2
    assert "> hello there you\r\n> " in shown
    os.close(ours)
    os.close(theirs)


def test_a_line_that_is_no_text_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    _typed(monkeypatch, "one\n\udcff\n")
    assert main(["--interactive"], folder) == 1
    assert capsys.readouterr() == (
        "hello there you\n",
        "error: standard input, line 2: not UTF-8 (invalid start byte)\n",
    )


def test_without_a_chat_template_each_line_is_continued_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _typed(monkeypatch, "the capital\nparis\n")
    assert main(["--interactive"], make_continuing(tmp_path / "a")) == 0
    told = "notice: this artifact has no chat template: each line is continued on its own\n"
    assert capsys.readouterr() == (" of france is paris .\n .\n", told)


def test_ctrl_c_ends_a_conversation_with_130(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(folder / "run.py"), "--interactive"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.readline() == "hello there you\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read() == ""
    process.stdin.close()
