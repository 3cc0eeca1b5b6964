"""Texts in, results out: tokens, batches, scores and the JSON of each task."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tx_export import runtime
from tx_export.runtime import Model, TxExportError

from .artifact import HEAD, LIMIT, TABLE, TYPES, edit_manifest, logits, make_artifact, seal, softmax

# Scores come from float32 logits below 10 in size: a few units of the last place, times at most 1 for a softmax.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_artifact(tmp_path_factory.mktemp("texts") / "a"), threads=2)


def scores(result: dict[str, Any]) -> list[float]:
    return list(result["scores"].values())


def reference(ids: list[int], types: list[int] | None = None) -> np.ndarray:
    """The scores of one row of ids, from the formula."""
    return softmax(logits([ids], [[1] * len(ids)], [types or [0] * len(ids)])[0])


def test_a_text_gives_its_label_and_the_score_of_each(model: Model) -> None:
    [result] = model(["Good film"])
    expected = reference([2, 4, 6, 3])
    assert np.abs(np.array(scores(result)) - expected).max() <= ROUNDING
    assert list(result["scores"]) == ["negative", "positive"]
    assert result["label"] == ["negative", "positive"][expected.argmax()]
    assert result["score"] == max(scores(result)) and set(result) == {"label", "score", "scores"}


def test_a_pair_gets_both_types_and_the_separator(model: Model) -> None:
    [result] = model([("good", "bad film")])
    expected = reference([2, 4, 3, 5, 6, 3], [0, 0, 0, 1, 1, 1])
    assert np.abs(np.array(scores(result)) - expected).max() <= ROUNDING


def test_results_come_in_input_order_whatever_the_lengths(model: Model) -> None:
    texts = [" ".join(["good", "bad", "film"][(i * j) % 3] for j in range(i % 12 + 1)) for i in range(400)]
    found = [scores(result) for result in model(texts)]
    alone = [scores(result) for text in texts for result in model([text])]
    assert np.abs(np.array(found) - np.array(alone)).max() <= ROUNDING
    assert np.ptp(np.array(alone)) > 0.1  # the texts differ, so a wrong order would show


def test_b198_a_batch_is_padded_to_its_longest_row_only_and_stays_within_the_budget(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    run = model._sessions.run

    def record(threads: int, outputs: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes.append(feeds["input_ids"].shape)
        return run(threads, outputs, feeds)

    monkeypatch.setattr(model._sessions, "run", record)
    model(["good " * 3] * 32 + ["bad " * 14])
    assert {tokens for _, tokens in shapes} == {5, 16}
    assert all(batch * tokens <= model._sessions.batch_tokens for batch, tokens in shapes)
    assert len(shapes) < 5


def test_many_texts_and_few_give_the_same_whatever_the_threads(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda m: m | {"session": {"cpu": m["session"]["cpu"] | {"batch_tokens": 8}}})
    texts = [f"good {'film ' * (i % 9)}" for i in range(64)]
    found = [[scores(result) for result in Model(folder, threads=threads)(texts)] for threads in (1, 2, 4)]
    # Sums of at most 16 rows in another order: rounding only.
    assert np.abs(np.array(found) - np.array(found[0])).max() <= ROUNDING


def test_the_first_result_is_there_before_the_second_text_is_read(model: Model) -> None:
    read: list[str] = []

    def texts() -> Iterator[str]:
        for text in ("good", "bad", "film"):
            read.append(text)
            yield text

    stream = model.stream(texts())
    next(stream)
    assert read == ["good"]
    assert len(list(stream)) == 2 and read == ["good", "bad", "film"]


def test_a_stream_that_is_left_early_ends_cleanly(model: Model) -> None:
    stream = model.stream(["good film"] * 5000)
    assert [next(stream)["label"] for _ in range(600)] == [model(["good film"])[0]["label"]] * 600
    assert isinstance(stream, Generator)
    stream.close()


def test_no_texts_give_no_results(model: Model) -> None:
    assert model([]) == [] and list(model.stream([])) == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("good", "texts: expected a list of texts, not one str"),
        (["good", 5], "text 1: expected a str or a pair of them, not int"),
        ([("good", "bad", "film")], "text 0: expected a str or a pair of them, not tuple"),
        ([("good", None)], "text 0: expected a str or a pair"),
    ],
)
def test_what_is_no_text_is_refused(model: Model, texts: Any, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        model(texts)


def test_b208_an_empty_text_is_answered_from_the_special_tokens(model: Model) -> None:
    for text in ("", " "):
        assert np.abs(np.array(scores(model([text])[0])) - reference([2, 3])).max() <= ROUNDING
    both = model(["", "hello"])
    assert np.abs(np.array(scores(both[1])) - reference([2, 14, 3])).max() <= ROUNDING


def test_b208_an_empty_text_without_special_tokens_is_an_error_that_gives_its_index(tmp_path: Path) -> None:
    plain = Model(make_artifact(tmp_path / "a", special=False), threads=1)
    assert np.abs(np.array(scores(plain(["hello"])[0])) - reference([14])).max() <= ROUNDING
    with pytest.raises(TxExportError, match="text 1: has no tokens, and this tokenizer adds no special ones"):
        plain(["hello", "  "])


def test_a_long_text_is_cut_with_its_special_tokens_kept_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Model(make_artifact(tmp_path / "a"), threads=1)
    long = "good bad film " * 30
    first, short, second = opened([long, "good", long])
    expected = reference([2, *([4, 5, 6] * 5)[: LIMIT - 2], 3])
    assert np.abs(np.array(scores(first)) - expected).max() <= ROUNDING
    assert first["truncated"] is True and second["truncated"] is True and "truncated" not in short
    error = capsys.readouterr().err
    assert error.startswith(f"notice: text 0 was cut to {LIMIT} tokens") and error.count("notice:") == 1


def test_the_longer_of_a_pair_is_cut_first(model: Model) -> None:
    [result] = model([("good bad", "film " * 40)])
    # 16 tokens: [CLS] good bad [SEP] + 11 films + [SEP]
    expected = reference([2, 4, 5, 3, *[6] * 11, 3], [0] * 4 + [1] * 12)
    assert result["truncated"] and np.abs(np.array(scores(result)) - expected).max() <= ROUNDING


@pytest.mark.parametrize("limit", [1, 2])
def test_b206_a_limit_below_the_special_tokens_is_an_error(tmp_path: Path, limit: int) -> None:
    opened = Model(make_artifact(tmp_path / "a", text={"max_length": limit, "pad_id": 0}), threads=1)
    with pytest.raises(TxExportError, match=f"text 0: the limit of {limit} tokens is too low for its special tokens"):
        opened([("good film", "bad")])


@pytest.mark.parametrize("pad", [-1, 50_000])
def test_b206_a_pad_id_that_the_model_lacks_changes_no_answer(tmp_path: Path, pad: int) -> None:
    folder = make_artifact(tmp_path / "a")
    expected = Model(folder, threads=1)(["good film bad", "good"])
    edit_manifest(folder, lambda manifest: manifest | {"text": manifest["text"] | {"pad_id": pad}})
    assert Model(folder, threads=1)(["good film bad", "good"]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "x" * 100_000 + " good bad",
        "good" + " " * 100_000 + "bad film",
        "\n" * 100_000,
        "the film was good, a bad one. " * 3_334,
        "\N{GRINNING FACE}" * 20_000,
        "\N{GRINNING FACE} " * 20_000,
        "good " * 13 + "x" * 100_000,
        "x" * 90 + " " + "x" * 100_000,
        "\u4e00" * 100_000,
    ],
)
def test_b209_a_hundred_thousand_characters_give_what_cutting_after_tokenizing_gives(model: Model, text: str) -> None:
    # The reference is the tokenizers package on the whole text; a pair of the two takes the other half.
    full = tokenizers.Tokenizer.from_str((model.folder / "tokenizer.json").read_text(encoding="utf-8"))
    full.no_padding()
    full.enable_truncation(LIMIT)
    assert model._tokenizer is not None
    assert model._tokenizer.encode(0, text).ids == full.encode(text).ids
    assert model._tokenizer.encode(0, ("good film", text)).ids == full.encode("good film", text).ids


@pytest.mark.parametrize("text", ["the film was good, a bad one. " * 3_334, "good " + "\u4e00" * 100_000])
def test_b209_what_is_thrown_away_is_not_tokenized(model: Model, text: str) -> None:
    assert model._tokenizer is not None
    assert LIMIT < len(model._tokenizer._shorten(text)) < 5_000


@pytest.mark.parametrize("kind", ["bytes", "unigram"])
def test_other_tokenizers_are_cut_right_too(kind: str, tmp_path: Path) -> None:
    lines = Path(runtime.__file__).read_text(encoding="utf-8").splitlines()
    if kind == "bytes":
        full = tokenizers.Tokenizer(tokenizers.models.BPE())
        full.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    else:
        full = tokenizers.Tokenizer(tokenizers.models.Unigram())
        full.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    full.train_from_iterator(lines, trainer)
    path = tmp_path / "tokenizer.json"
    path.write_text(full.to_str(), encoding="utf-8")
    full.enable_truncation(64)
    ids = runtime._Tensor("input_ids", np.dtype(np.int64), (), None, None)
    ours = runtime._Tokenizer(runtime._open_tokenizer(path), {"max_length": 64}, ids, runtime._Notices())
    for text in (
        "x" * 20_000,
        " ".join(lines)[:20_000],
        "\N{GRINNING FACE}" * 5_000,
        "a" + " " * 20_000 + "b",
        "1" * 20_000,
    ):
        assert ours.encode(0, text).ids == full.encode(text).ids


def test_b210_half_a_surrogate_pair_becomes_the_replacement_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Model(make_artifact(tmp_path / "a"), threads=1)
    found = opened(["good", "good \ud83d film", "bad"])
    assert found[1] == opened(["good \ufffd film"])[0]
    assert found[0] == opened(["good"])[0] and found[2] == opened(["bad"])[0]
    assert "notice: text 1 holds half of a surrogate pair; U+FFFD" in capsys.readouterr().err


def test_an_id_that_the_model_lacks_is_an_error_with_the_index_of_its_text(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    smaller = {"name": "input_ids", "dtype": "int64", "dims": ["batch", "tokens<=16"], "range": [0, 13]}
    edit_manifest(folder, lambda m: m | {"inputs": [smaller, *m["inputs"][1:]]})
    with pytest.raises(TxExportError, match=r"text 1: token id 14; the model takes 0\.\.13"):
        Model(folder)(["good", "hello"])


def test_independent_labels_take_a_sigmoid_each_and_so_does_a_single_label(tmp_path: Path) -> None:
    text = {"max_length": LIMIT, "pad_id": 0, "labels": ["a", "b"], "scores": "sigmoid"}
    [found] = Model(make_artifact(tmp_path / "two", text=text), threads=1)(["good"])
    value = logits([[2, 4, 3]], [[1, 1, 1]])[0]
    assert np.abs(np.array(scores(found)) - 1 / (1 + np.exp(-value))).max() <= ROUNDING
    text = text | {"labels": ["relevant"], "scores": "softmax"}
    [found] = Model(make_artifact(tmp_path / "one", head=HEAD[:, :1], text=text), threads=1)([("good", "film")])
    value = logits([[2, 4, 3, 6, 3]], [[1] * 5], [[0, 0, 0, 1, 1]])[0]
    assert found["label"] == "relevant" and abs(found["score"] - 1 / (1 + np.exp(-value[0]))) <= ROUNDING


def test_labels_without_names_are_numbers(tmp_path: Path) -> None:
    [found] = Model(make_artifact(tmp_path / "a", text={"max_length": LIMIT}), threads=1)(["good"])
    assert list(found["scores"]) == ["0", "1"]


def test_an_embedder_gives_the_vector(tmp_path: Path) -> None:
    [found, _] = Model(make_artifact(tmp_path / "a", task="sentence-embedding"), threads=1)(["good", "bad film"])
    assert set(found) == {"embedding"}
    assert np.abs(np.array(found["embedding"]) - logits([[2, 4, 3]], [[1] * 3])[0]).max() <= ROUNDING


def test_token_labels_are_those_of_the_real_tokens_without_the_special_ones(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", per_token=True, task="token-classification")
    short, long = Model(folder, threads=1)(["films", "good bad film"])
    best = ((TABLE + TYPES[0]) @ HEAD).argmax(-1)
    names = ["negative", "positive"]
    assert short == {"tokens": ["film", "##s"], "labels": [names[best[6]], names[best[10]]]}
    assert long == {"tokens": ["good", "bad", "film"], "labels": [names[best[i]] for i in (4, 5, 6)]}


def test_any_other_task_gives_the_outputs_without_padding(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", per_token=True, task="feature-extraction")
    short, long = Model(folder, threads=1)(["good", "good bad film"])
    assert np.abs(np.array(short["outputs"]["logits"]) - (TABLE[[2, 4, 3]] + TYPES[0]) @ HEAD).max() <= ROUNDING
    assert np.array(long["outputs"]["logits"]).shape == (5, 2)


def test_b205_a_graph_without_token_types_gets_none_and_one_without_a_tokenizer_of_them_gets_zeros(
    tmp_path: Path,
) -> None:
    folder = make_artifact(tmp_path / "a")
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    known["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    [found] = Model(seal(folder), threads=1)(["good"])
    assert np.abs(np.array(scores(found)) - reference([2, 4])).max() <= ROUNDING


def test_an_answer_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    broken = Model(make_artifact(tmp_path / "a", head=np.full((8, 2), np.inf, np.float32)), threads=1)
    with pytest.raises(TxExportError, match="text 0: output 'logits' is not finite"):
        broken(["good"])


def test_a_wrong_number_of_labels_is_an_error(tmp_path: Path) -> None:
    text = {"max_length": LIMIT, "labels": ["only"]}
    with pytest.raises(TxExportError, match="has 1 labels for 2 scores"):
        Model(make_artifact(tmp_path / "a", text=text), threads=1)(["good"])


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_a_graph_of_another_task_than_the_manifest_says_is_an_error(tmp_path: Path, task: str) -> None:
    folder = make_artifact(tmp_path / "a", per_token=task == "text-classification", task=task)
    with pytest.raises(TxExportError, match=f"a {task} gives .* for each (label|token), not shape "):
        Model(folder, threads=1)(["good"])


def test_an_output_of_another_rank_than_declared_is_an_error(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", outputs=[{"name": "logits", "dtype": "float32", "dims": ["batch", 2, 1]}])
    with pytest.raises(TxExportError, match=r"output logits:float32\[batch,2,1\]: the graph gives shape \[1, 2\]"):
        Model(folder, threads=1)(["good"])
