"""`python run.py`: what it reads, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tx_export import runtime
from tx_export.runtime import Model, TxExportError, UsageError, main, pair_up, read_texts

from .artifact import edit_manifest, make_artifact

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("program") / "a")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


def program(
    folder: Path, *arguments: str, piped: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run run.py as a user does, from another folder."""
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, input=piped, env=env, cwd="/", capture_output=True, text=True, encoding="utf-8")


def started(folder: Path) -> subprocess.Popen[str]:
    """Run run.py on a pipe, and wait for its first answer."""
    command = [sys.executable, str(folder / "run.py"), "--input", "-"]
    pipe = subprocess.PIPE
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=buffered)
    watch = threading.Timer(60, process.kill)  # an answer that never comes fails the test instead of stopping it
    watch.daemon = True
    watch.start()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("good\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith("\tgood\n")
    return process


def test_it_runs_on_its_own_from_any_folder_and_writes_nothing(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "an artifact's \u00fc\u0436\u4e2d")
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    done = program(folder, "good", "bad")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split("\t")[2] for line in done.stdout.splitlines()] == ["good", "bad"]
    assert program(folder, "--self-test").returncode == 0
    assert program(folder, "--bench", "--batch", "1", "--tokens", "2").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


def test_it_imports_neither_torch_nor_onnx_nor_us(folder: Path) -> None:
    code = (
        "import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1]); import run;"
        "assert not {'onnxruntime', 'tokenizers'} & set(sys.modules); run.Model(sys.argv[1])(['good']);"
        "print(sorted({'torch', 'onnx', 'tx_export', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_classifier_prints_label_score_and_text(folder: Path, model: Model, capsys: Capture) -> None:
    assert main(["good\tfilm\nbad", "good"], folder) == 0
    one, two = model(["good\tfilm\nbad", "good"])
    expected = [f"{one['label']}\t{one['score']:.4f}\tgood film bad", f"{two['label']}\t{two['score']:.4f}\tgood"]
    assert capsys.readouterr().out.splitlines() == expected


def test_json_is_one_object_a_line(folder: Path, model: Model, capsys: Capture) -> None:
    assert main(["good", "bad", "--json"], folder) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == model(["good", "bad"])


def test_what_is_no_classifier_prints_json(tmp_path: Path, capsys: Capture) -> None:
    folder = make_artifact(tmp_path / "a", task="sentence-embedding")
    assert main(["good"], folder) == 0
    assert len(json.loads(capsys.readouterr().out)["embedding"]) == 2


def test_piped_input_is_read_when_there_is_no_text(folder: Path, model: Model) -> None:
    done = program(folder, "--json", piped="good\r\n\r\n  bad\n")
    assert [json.loads(line) for line in done.stdout.splitlines()] == model(["good", "", "  bad"])


def test_a_line_is_answered_while_the_pipe_is_open(folder: Path) -> None:
    with started(folder) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def test_without_text_on_a_terminal_or_with_nothing_piped_it_is_a_usage_error(folder: Path) -> None:
    leader, terminal = pty.openpty()
    for stdin in (terminal, subprocess.DEVNULL):
        command = [sys.executable, str(folder / "run.py")]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: no text: give TEXT arguments, --input FILE")
    os.close(leader)
    os.close(terminal)


def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    with started(folder) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.write("good\n" * 1000)
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_control_c_ends_it_with_130_and_no_traceback(folder: Path) -> None:
    with started(folder) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--foo"], "unrecognized arguments: --foo; see --help"),
        (["--threads", "0", "good"], "argument --threads: '0' is not a whole number from 1 up"),
        (["--bench", "--batch", "1,x"], "argument --batch: 'x' is not a whole number from 1 up"),
        (["good", "--input", "a.txt"], "texts come either as arguments or from --input, not both"),
        (["--input", "a.pdf"], "--input a.pdf: expected a .txt, .tsv, .jsonl or .csv file, or - for standard input"),
        (["--input", "nowhere.txt"], "--input nowhere.txt: no such file"),
        (["--input", "a.csv"], "--input a.csv: --column NAME goes with .csv files, and they need it"),
        (["--input", "a.txt", "--column", "b"], "--input a.txt: --column NAME goes with .csv files"),
        (["--pair", "a"], "--pair goes with a TEXT argument"),
        (["a", "b", "c", "--pair", "d", "--pair", "e"], "--pair: given 2 times for 3 texts"),
        (["--self-test", "--bench"], "--self-test or --bench, not both"),
        (["--self-test", "good"], "--self-test and --bench take no text"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    folder: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert main(arguments, folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_cuda_without_cuda_fails_and_says_what_there_is(folder: Path, capsys: Capture) -> None:
    assert main(["--provider", "cuda", "good"], folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: provider cuda: ") and "CPUExecutionProvider" in error


def test_a_traceback_is_shown_with_debug_only(folder: Path, capsys: Capture) -> None:
    assert main(["--provider", "cuda", "good", "--debug"], folder) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_too(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "run", lambda *_, **__: json.loads("{}")["gone"])
    assert main(["good"], folder) == 1
    assert capsys.readouterr().err == "error: unexpected KeyError: 'gone'\n"


def test_help_names_every_option(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    options = "--input --pair --column --provider --threads --json --self-test --bench --batch --tokens --debug"
    assert ended.value.code == 0 and all(option in text for option in options.split())


def test_pairs_come_with_each_text_or_all_with_one() -> None:
    assert pair_up(["a", "b"], []) == ["a", "b"]
    assert pair_up(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    assert pair_up(["a"], ["c", "d"]) == [("a", "c"), ("a", "d")]
    with pytest.raises(UsageError, match="given 2 times for 0 texts"):
        pair_up([], ["c", "d"])


def test_a_pair_on_the_command_line_is_a_pair(folder: Path, model: Model, capsys: Capture) -> None:
    assert main(["good", "--pair", "film", "--json"], folder) == 0
    assert json.loads(capsys.readouterr().out) == model([("good", "film")])[0]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"good\nbad", ["good", "bad"]),
        ("a.txt", b"\xef\xbb\xbfgood\r\n\r\nb\xc3\xa4d\r\n", ["good", "", "b\u00e4d"]),
        ("a.txt", b"a\x0cb\xe2\x80\xa8c\n", ["a\x0cb\u2028c"]),
        ("a.txt", b"", []),
        ("a.txt", b"\n", [""]),
        ("a.txt", b"a\x00b\n", ["a\x00b"]),
        ("A.TXT", b"a\tb\n", ["a\tb"]),
        ("a.tsv", b"one\nfirst\tsecond\n", ["one", ("first", "second")]),
        ("a.tsv", b"\xef\xbb\xbfa\tb\r\n\r\nc", [("a", "b"), "", "c"]),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b", "pair": "c", "id": 1}\r\n"d"\n', ["a", ("b", "c"), "d"]),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', ["\ud83d"]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a\\u0000b"}\r\n', ["a\x00b"]),
        ("a.csv", b'id,body\n1,"a, ""b"""\n2,"c\nd"\n', ['a, "b"', "c\nd"]),
        ("a.csv", b'\xef\xbb\xbfbody\r\n"a\r\nb"\r\nc\x00d\r\n', ["a\nb", "c\x00d"]),
    ],
)
def test_files_are_read_by_their_kind(tmp_path: Path, name: str, content: bytes, expected: list[Any]) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read_texts(tmp_path / name, "body" if name.endswith("csv") else None)) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nb\xe4d\n", r"a\.txt, line 2: not UTF-8"),
        ("a.tsv", b"a\nb\tc\td\n", r"a\.tsv, line 2: 3 columns; expected one text, or two \(a pair\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON: Expecting value"),
        ("a.jsonl", b'{"txt": "a"}\n', r'a\.jsonl, line 1: expected \{"text": "\.\.\."\}'),
        ("a.jsonl", b'"a"\n\n[1]\n', r'a\.jsonl, line 3: expected \{"text": "\.\.\."\}'),
        ("a.jsonl", b"null\n", r'a\.jsonl, line 1: expected \{"text": "\.\.\."\}'),
        ("a.jsonl", b'{"text": "a"} {"text": "b"}\n', r"a\.jsonl, line 1: not JSON: Extra data"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON: "),
        ("a.jsonl", b"1" * 5_000, r"a\.jsonl, line 1: not JSON: "),
        ("a.jsonl", b'{"text": "a", "pair": 3}\n', r"a\.jsonl, line 1: expected"),
        ("a.csv", b"id,text\n1,a\n", r"a\.csv: no column 'body'; it has id, text"),
        ("a.csv", b"", r"a\.csv: no column 'body'; it has nothing"),
        ("a.csv", b"id,body\n1\n", r"a\.csv, line 2: too few columns"),
    ],
)
def test_what_can_not_be_read_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TxExportError, match=message):
        list(read_texts(tmp_path / name, "body" if name.endswith("csv") else None))


def test_a_long_field_of_a_csv_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("body\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert len(str(next(iter(read_texts(tmp_path / "a.csv", "body"))))) == 200_000


def test_results_before_a_bad_line_are_printed(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnonsense\n', encoding="utf-8")
    assert main(["--input", str(tmp_path / "a.jsonl")], folder) == 1
    out, error = capsys.readouterr()
    assert out.endswith("\tgood\n") and "line 2: not JSON" in error


def test_half_a_character_in_a_file_is_answered_and_printed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud83d"}\n{"text": "film"}\n', encoding="utf-8")
    done = program(folder, "--input", str(tmp_path / "a.jsonl"))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
    assert done.stdout.splitlines()[1].endswith("\tbad \ufffd")
    assert done.stderr.startswith("notice: text 1 holds half of a surrogate pair")


def test_text_that_the_terminal_can_not_show_is_printed_with_escapes(folder: Path) -> None:
    done = program(folder, "b\u00e4d", env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and done.stdout.endswith("\tb\\xe4d\n")


def test_bytes_that_are_no_text_on_the_command_line_are_repaired(folder: Path) -> None:
    done = subprocess.run([sys.executable, str(folder / "run.py"), b"good \xff"], capture_output=True)
    assert done.returncode == 0 and done.stdout.decode().endswith("\tgood \ufffd\n") and b"notice: " in done.stderr


def test_run_prints_where_it_is_told_to(folder: Path) -> None:
    out = io.StringIO()
    runtime.run(folder, ["good"], as_json=True, out=out)
    assert "label" in json.loads(out.getvalue())


def test_a_text_that_was_cut_is_marked_and_announced(folder: Path, capsys: Capture) -> None:
    assert main(["good " * 50, "--json"], folder) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["truncated"] is True and error.startswith("notice: text 0 was cut to 16 tokens")


def test_an_artifact_for_arrays_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda manifest: manifest | {"text": None})
    assert main(["good"], folder) == 1
    assert "has no tokenizer; it takes arrays" in capsys.readouterr().err
