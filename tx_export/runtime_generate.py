"""Token-by-token generation with a cache of keys and values; numpy and ONNX Runtime only.

A graph takes input_ids [batch, tokens], attention_mask [batch, past + tokens], logits_at [kept], and for each layer
past.N.key and past.N.value [batch, heads, past, head_dim]; it gives logits [batch, kept, vocabulary], and present.N.key
and present.N.value, which hold past + tokens. Behind an encoder, which reads input_ids and attention_mask once and
gives cross.N.key and cross.N.value, the new tokens are decoder_input_ids, their mask is decoder_attention_mask. This
file is copied into artifacts as generate.py.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Generator", "LimitError", "Options", "Rules", "Run", "TextStream", "logits_with_cache", "names", "read"]

Arrays = dict[str, np.ndarray]
Run = Callable[[Mapping[str, np.ndarray]], Arrays]

_STEPS = 4  # single tokens at the end of a row that is read to check the cache
_USUAL = 128  # new tokens where no number is given
_PIECE = 256  # tokens of prompts that are read at once; what a run needs besides the cache grows with their square
_WASTE = 4  # a cache of up to so many times the need is used again
_UNLIKELY = -50.0  # the logarithm of a probability that float64 loses beside 1
_DTYPES = {"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"}
_DTYPES |= {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}


class LimitError(ValueError):
    """What was asked for can't be done; the message is for people."""


# ---- What is asked for

_LEAST = {"max_new_tokens": 1, "top_k": 0, "seed": 0, "beams": 1, "no_repeat_ngram": 0, "min_new_tokens": 0}
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("of at least 0", lambda value: 0 <= value < math.inf),
    "top_p": ("above 0 and up to 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: 0 < value < math.inf),
    "length_penalty": ("from -100 to 100", lambda value: abs(value) <= 100),
}


@dataclass(frozen=True)
class Options:
    """How a continuation is chosen; LimitError names the option that is out of its range."""

    max_new_tokens: int | None = None  # None: 128, or what the limit leaves to the longest prompt
    temperature: float = 0.0  # 0: always the likeliest
    top_k: int = 0  # 0: all; as top_p and min_p, for a temperature above 0 only
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # beside the artifact's own ends

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name == "max_new_tokens" and value is None:
                continue
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
                raise LimitError(f"{name}: {value!r} is not a whole number of at least {least}")
        for name, (text, allows) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not allows(float(value)):
                raise LimitError(f"{name}: {value!r} is not a number {text}")
        if self.beams > 1 and self.temperature > 0:
            raise LimitError(f"beams: {self.beams} beams keep the likeliest; they don't go with a temperature above 0")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise LimitError("top_k, top_p and min_p need a temperature above 0; at 0 the likeliest token is taken")


# ---- From logits to a token


@dataclass(frozen=True)
class Rules:
    """From logits to scores and probabilities [vocabulary] of one position, in float64; transformers' order."""

    options: Options
    limit: int  # of new tokens
    eos: frozenset[int] = frozenset()
    forced_bos: int | None = None
    forced_eos: int | None = None
    suppressed: tuple[int, ...] = ()

    def scores(self, logits: np.ndarray, ids: Sequence[int], new: int) -> np.ndarray:
        """`logits` [vocabulary] (or log probabilities) behind `ids`, of which the last `new` are new; -inf: never."""
        options, scores = self.options, logits.astype(np.float64)
        if options.repetition_penalty != 1:
            found = scores[list(ids)]
            penalty = options.repetition_penalty
            scores[list(ids)] = np.where(found < 0, found * penalty, found / penalty)
        scores[_repeating(ids, options.no_repeat_ngram)] = -np.inf
        if new < options.min_new_tokens:
            scores[list(self.eos)] = -np.inf
        scores[list(self.suppressed)] = -np.inf
        forced = self.forced_bos if len(ids) == 1 else None
        forced = self.forced_eos if new == self.limit - 1 and self.forced_eos is not None else forced
        if forced is not None:
            scores[:] = -np.inf
            scores[forced] = 0
        return scores

    def likely(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be drawn, and the probability of each, for a temperature above 0."""
        options = self.options
        with np.errstate(over="ignore"):  # far below the largest is minus infinity
            scores = (scores - scores.max()) / options.temperature
        floor = _UNLIKELY
        if 0 < options.top_k < len(scores):
            floor = max(floor, np.partition(scores, -options.top_k)[-options.top_k])
        tokens = np.flatnonzero(scores >= floor)
        found = np.exp(scores[tokens])
        if options.top_p < 1:
            kept = _nucleus(found / found.sum(), options.top_p)
            tokens, found = tokens[kept], found[kept]
        kept = found >= options.min_p * found.max()
        tokens, found = tokens[kept], found[kept]
        return tokens, np.asarray(found / found.sum())

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether nothing is asked for but the likeliest token."""
        options = self.options
        is_ruled = options.temperature or options.no_repeat_ngram or options.min_new_tokens or self.suppressed
        is_forced = (self.forced_bos, self.forced_eos) != (None, None)
        return not (is_ruled or options.repetition_penalty != 1 or is_forced)

    def follow(self, logits: np.ndarray, ids: Sequence[int], new: int, random: np.random.Generator) -> int:
        """The token behind `ids`; without a rule of any kind the likeliest, found without a copy of the logits."""
        if not self._is_plain or new == 0:
            _check_finite(logits, new)
        if not self._is_plain:
            return self.choose(self.scores(logits, ids, new), random)
        token = int(logits.argmax())  # of NaN and infinity too; looking at all of them costs a hundredth of a step
        if not math.isfinite(logits[token]):
            _check_finite(logits, new)
        return token

    def choose(self, scores: np.ndarray, random: np.random.Generator) -> int:
        """The likeliest token, or one that is drawn."""
        _check_left(scores)
        if self.options.temperature == 0:
            return int(scores.argmax())
        tokens, found = self.likely(scores)
        cumulative = found.cumsum()
        return int(tokens[np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")])


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Places of the fewest that hold `top_p` together, in order; only those that may be among them are sorted."""
    rest = 1 - top_p
    is_large = probabilities >= rest / len(probabilities)  # all others together hold less than the rest
    large, small = np.flatnonzero(is_large), probabilities[~is_large].sum()
    order = large[probabilities[large].argsort()]
    start = np.searchsorted(small + probabilities[order].cumsum(), rest, side="right")
    return np.sort(order[min(int(start), len(order) - 1) :])


def _repeating(ids: Sequence[int], size: int) -> list[int]:
    """The tokens that would end an n-gram of `size` which `ids` already hold."""
    if size == 0 or len(ids) < size:
        return []
    end = list(ids[len(ids) - size + 1 :])
    return [ids[start + size - 1] for start in range(len(ids) - size + 1) if list(ids[start : start + size - 1]) == end]


def _check_left(scores: np.ndarray) -> None:
    if scores.max() == -np.inf:
        raise LimitError("no token is left to choose: each is suppressed or repeats an n-gram")


def _check_finite(logits: np.ndarray, step: int) -> None:
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(logits.sum()) or np.isfinite(logits).all()  # a sum costs less, and may overflow
    if not is_finite:
        raise LimitError(f"the logits of step {step} are not finite; the graph is broken for this prompt")


# ---- The cache


class _Cache(abc.ABC):
    """Keys and values of the rows that are being read, of all layers; `held` are the ids in it, of a single row."""

    held: tuple[int, ...] = ()

    @abc.abstractmethod
    def bind(self, binding: Any, rows: int) -> None:
        """Before a run: as past and present, behind the logits."""

    @abc.abstractmethod
    def follow(self, binding: Any) -> None:
        """After a run: what was present is past."""

    @abc.abstractmethod
    def select(self, rows: np.ndarray, filled: int) -> None:
        """Row i becomes what row rows[i] was, in its first `filled` positions."""

    @abc.abstractmethod
    def lengthened(self, graph: _Graph, length: int) -> _Cache:
        """With room for so many positions, of which the first are `held`."""


class _SharedCache(_Cache):
    """Arrays [rows, heads, length, head_dim] of their full length, which the graph reads and writes in place."""

    def __init__(self, graph: _Graph, rows: int, length: int, flat: np.ndarray | None = None) -> None:
        shapes = [(rows, heads, length, head_dim) for heads, head_dim in graph.heads]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        self._names = graph.past, graph.present
        if flat is None or not ends[-1] <= flat.size <= _WASTE * ends[-1]:
            flat = np.zeros(ends[-1], graph.cache_dtype)
        self.flat = flat  # one piece for all layers, which the system then maps in large pages
        pieces = np.split(flat, ends)
        self.arrays = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        self.length, self._binding = length, None

    def bind(self, binding: Any, rows: int) -> None:
        if binding is self._binding:
            return
        self._binding = binding
        for past, present, array in zip(*self._names, self.arrays, strict=True):
            _bind_input(binding, past, array[:rows])
            _bind_output(binding, present, array[:rows])

    def follow(self, binding: Any) -> None:
        pass

    def select(self, rows: np.ndarray, filled: int) -> None:
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        for array in self.arrays:
            array[moved, :, :filled] = array[rows[moved], :, :filled]

    def row(self, row: int, padding: int) -> _SharedCache:
        """The same memory, of one row whose first positions are padding, which nothing will write."""
        one = copy.copy(self)
        one.arrays, one._binding = [array[row : row + 1] for array in self.arrays], None
        for array in one.arrays:
            array[:, :, :padding] = 0
        return one

    def lengthened(self, graph: _Graph, length: int) -> _Cache:
        if length <= self.length:
            return self
        longer, filled = _SharedCache(graph, 1, length), len(self.held)
        for array, found in zip(longer.arrays, self.arrays, strict=True):
            array[:, :, :filled] = found[:, :, :filled]
        return longer


class _GrowingCache(_Cache):
    """Values of ONNX Runtime that each run makes anew, for graphs and devices that don't write in place."""

    def __init__(self, graph: _Graph, rows: int) -> None:
        self._names, self._device = (graph.past, graph.present), graph.device
        self._values: list[Any] = [
            np.zeros((rows, heads, 0, head_dim), graph.cache_dtype) for heads, head_dim in graph.heads
        ]

    def bind(self, binding: Any, rows: int) -> None:
        for past, present, value in zip(*self._names, self._values, strict=True):
            _bind_value(binding, past, value)
            binding.bind_output(present, self._device)

    def follow(self, binding: Any) -> None:
        self._values = binding.get_outputs()[1:]

    def select(self, rows: np.ndarray, filled: int) -> None:
        self._values = [np.ascontiguousarray(value.numpy()[rows]) for value in self._values]

    def lengthened(self, graph: _Graph, length: int) -> _Cache:
        return self


def _bind_input(binding: Any, name: str, array: np.ndarray) -> None:
    """Without a copy: the array must live, and stay where it is, until the run is over."""
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.__array_interface__["data"][0])


def _bind_output(binding: Any, name: str, array: np.ndarray) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _bind_value(binding: Any, name: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        _bind_input(binding, name, value)
    else:
        binding.bind_ortvalue_input(name, value)


# ---- Reading


class _Graph:
    """The session that reads tokens, and what its graph takes and gives."""

    def __init__(self, session: Any, run_options: Any, shared: bool) -> None:
        inputs, outputs = (
            {item.name: item for item in items} for items in (session.get_inputs(), session.get_outputs())
        )
        self.session, self.run_options, self.inputs = session, run_options, frozenset(inputs)
        behind_encoder = "decoder_input_ids" in inputs
        self.ids = "decoder_input_ids" if behind_encoder else "input_ids"
        self.mask = "decoder_attention_mask" if behind_encoder else "attention_mask"
        self.past = [name for name in inputs if name.startswith("past.")]
        self.present = [name.replace("past", "present", 1) for name in self.past]
        self.heads = [(int(inputs[name].shape[1]), int(inputs[name].shape[3])) for name in self.past]
        self.cache_dtype = _DTYPES[inputs[self.past[0]].type]
        self.ids_dtype, self.mask_dtype = (_DTYPES[inputs[name].type] for name in (self.ids, self.mask))
        self.vocabulary = int(outputs["logits"].shape[-1])
        self.logits_dtype = _DTYPES[outputs["logits"].type]
        self.device = "cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"
        self.shared = shared and self.device == "cpu"


class _Batch:
    """Rows that are read together, and their cache; only ids and mask are bound anew for each run."""

    def __init__(self, graph: _Graph, cache: _Cache, mask: np.ndarray, fixed: Arrays, filled: int) -> None:
        self._graph, self.cache, self._mask, self._fixed, self.filled = graph, cache, mask, fixed, filled
        self._bind()

    def _bind(self) -> None:
        graph, rows = self._graph, len(self._mask)
        self._binding = graph.session.io_binding()
        self._ids = self._at = np.empty((0, 0), graph.ids_dtype)  # nothing is bound yet
        self._logits = np.empty((rows, 1, graph.vocabulary), graph.logits_dtype)
        _bind_output(self._binding, "logits", self._logits)
        for name, array in self._fixed.items():
            _bind_input(self._binding, name, array)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Logits [rows, vocabulary] behind the last of ids [rows, tokens]; overwritten by the next run."""
        self._ids, self._at = np.array(ids, self._graph.ids_dtype, order="C"), np.array([ids.shape[1] - 1])
        _bind_input(self._binding, self._graph.ids, self._ids)
        _bind_input(self._binding, "logits_at", self._at)  # only the last of them gets logits
        return self._run()

    def read_next(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """As read, of a token for each row."""
        if self._ids.shape[1] != 1:
            return self.read(np.array(tokens)[:, None])
        self._ids[:, 0] = tokens
        return self._run()

    def _run(self) -> np.ndarray:
        graph, total = self._graph, self.filled + self._ids.shape[1]
        mask = np.ascontiguousarray(self._mask[:, :total])
        _bind_input(self._binding, graph.mask, mask)
        self.cache.bind(self._binding, len(mask))
        graph.session.run_with_iobinding(self._binding, graph.run_options)
        self.cache.follow(self._binding)
        self.filled = total
        return self._logits[:, 0]

    def single(self) -> Callable[[int], np.ndarray]:
        """read_next of a single row, for as long as nothing else is called; logits [vocabulary].

        When a run ends, the weights have driven all else out of the processor's caches, and every line costs.
        """
        graph, cache, ids = self._graph, self.cache, self._ids
        logits: np.ndarray = self._logits[0, 0]
        if ids.shape != (1, 1) or not isinstance(cache, _SharedCache):
            return lambda token: self.read_next([token])[0]
        binding, run, options = self._binding, graph.session.run_with_iobinding, graph.run_options
        bind, name, dtype = binding.bind_input, graph.mask, self._mask.dtype
        start = self._mask.__array_interface__["data"][0]

        def read(token: int) -> np.ndarray:
            ids[0, 0] = token
            self.filled += 1
            bind(name, "cpu", 0, dtype, (1, self.filled), start)
            run(binding, options)
            return logits

        return read

    def read_prompts(self, ids: np.ndarray) -> np.ndarray:
        """As read, but what is long is read row by row and in pieces."""
        if ids.size <= _PIECE or not isinstance(self.cache, _SharedCache):
            return self.read(ids)
        start, total = self.filled, self.filled + ids.shape[1]
        for row, mask in enumerate(self._mask):
            padding = int(mask[start:total].argmax())
            fixed = {name: array[row : row + 1] for name, array in self._fixed.items()}
            one = _Batch(self._graph, self.cache.row(row, padding), mask[None], fixed, start + padding)
            for piece in range(padding, ids.shape[1], _PIECE):
                self._logits[row] = one.read(ids[row : row + 1, piece : piece + _PIECE])
        self.filled = total
        return self._logits[:, 0]

    def reorder(self, rows: np.ndarray) -> None:
        """Each row goes on as that row, of the same prompt."""
        self.cache.select(rows, self.filled)

    def select(self, rows: np.ndarray) -> None:
        """These rows go on, in this order; one may be there several times."""
        self.cache.select(rows, self.filled)
        self._mask = self._mask[rows]
        self._fixed = {name: np.ascontiguousarray(array[rows]) for name, array in self._fixed.items()}
        self._bind()


# ---- Generation


class Generator:
    """Continues rows of token ids. One thread at a time keeps the cache between two calls; others get their own.

    `sessions` are onnxruntime's, {"model": ...} or {"encoder": ..., "decoder": ...}; `generation` is the manifest's.
    """

    def __init__(self, sessions: Mapping[str, Any], generation: Mapping[str, Any], run_options: Any = None) -> None:
        self._encoder, self._run_options = sessions.get("encoder"), run_options
        shared = bool(generation["cache"].get("shared", True))
        self._graph = _Graph(sessions["model" if self._encoder is None else "decoder"], run_options, shared)
        self._generation = generation
        self._kept: _Cache | None = None
        self._taking = threading.Lock()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options,
        listen: Callable[[int, list[int]], bool] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """The new ids of each row, without the one that ends it; rows are read together, padded on the left.

        `listen(row, ids)` gets a row's next ids as soon as they are chosen, and ends the row by returning True. Behind
        an encoder the prompts are its sources. What is drawn depends on the seed and on a row's number: its place,
        unless `numbers` gives others. LimitError says what is wrong with a prompt or the logits.
        """
        if options.beams > 1:
            if listen is not None:
                raise LimitError(f"beams: {options.beams} beams give nothing before the end; listen to one beam")
            return self._search(prompts, options)
        found: list[list[int]] = [[] for _ in prompts]
        ended: set[int] = set()
        for row, token in self._steps(prompts, options, ended, numbers):
            found[row].append(token)
            if listen is not None and listen(row, [token]):
                ended.add(row)
        return found

    def stream(self, prompt: Sequence[int], options: Options) -> Iterator[int]:
        """The new ids of one row, each as soon as it is chosen; the caller may stop at any."""
        if options.beams > 1:
            raise LimitError(f"beams: {options.beams} beams give nothing before the end; listen to one beam")
        return (token for _, token in self._steps([prompt], options, set()))

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options,
        ended: set[int],
        numbers: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Row and token, as they are chosen; a row that is put into `ended` gets no more."""
        if not prompts:
            return
        rows, rules = self._begin(prompts, options)
        randoms = [np.random.default_rng([options.seed, number]) for number in numbers or range(len(rows))]
        still, batch = list(range(len(rows))), self._open(prompts, rows, rules)
        try:
            logits = batch.read_prompts(_padded(rows)[0][:, batch.filled :])
            if len(rows) == 1:
                yield from self._row(batch, logits[0], rows[0], rules, randoms[0], ended)
                return
            for step in range(rules.limit):
                for row, found in zip(still, logits, strict=True):
                    token = rules.follow(found, rows[row], step, randoms[row])
                    if token in rules.eos:
                        ended.add(row)
                        continue
                    rows[row].append(token)
                    yield row, token
                places = [place for place, row in enumerate(still) if row not in ended]
                if not places or step == rules.limit - 1:
                    return
                if len(places) < len(still):
                    batch.select(np.array(places))
                still = [still[place] for place in places]
                logits = batch.read_next([rows[row][-1] for row in still])
        finally:
            self._keep(batch, rows)

    def _row(
        self,
        batch: _Batch,
        logits: np.ndarray,
        ids: list[int],
        rules: Rules,
        random: np.random.Generator,
        ended: set[int],
    ) -> Iterator[tuple[int, int]]:
        """The steps of a single row."""
        read = None
        for step in range(rules.limit):
            token = rules.follow(logits, ids, step, random)
            if token in rules.eos:
                return
            ids.append(token)
            yield 0, token
            if ended or step == rules.limit - 1:
                return
            if read is not None:
                logits = read(token)
            else:
                logits, read = batch.read_next([token])[0], batch.single()

    def _search(self, prompts: Sequence[Sequence[int]], options: Options) -> list[list[int]]:
        """The best beam of each row."""
        if not prompts:
            return []
        rows, rules = self._begin(prompts, options)
        searches = still = [_Search(row, rules) for row in rows]
        batch, width = self._open(prompts, rows, rules), 1
        logits = batch.read_prompts(_padded(rows)[0])
        for step in range(rules.limit):
            _check_finite(logits, step)
            for search, found in zip(still, np.split(logits, len(still)), strict=True):
                search.advance(found)
            places = [place for place, search in enumerate(still) if not search.done]
            if not places:
                break
            origins = np.concatenate([place * width + still[place].origins % width for place in places])
            same = width == options.beams and len(places) == len(still)
            (batch.reorder if same else batch.select)(origins)
            still, width = [still[place] for place in places], options.beams
            logits = batch.read_next(np.concatenate([search.tokens for search in still]))
        self._keep(batch, [])
        return [search.best() for search in searches]

    def _begin(self, prompts: Sequence[Sequence[int]], options: Options) -> tuple[list[list[int]], Rules]:
        """The ids that each row begins with, and the rules by which it goes on."""
        told, longest = self._generation, self._generation["cache"]["max_length"]
        rows = [self._start(row, prompt) for row, prompt in enumerate(prompts)]
        row = max(range(len(rows)), key=lambda row: len(rows[row]))
        most = len(rows[row])
        limit = options.max_new_tokens
        if limit is None:
            limit = max(1, min(_USUAL, longest - most))
        if most + limit > longest:
            read = f"{most} tokens" if self._encoder is None else "the token that it begins with"
            total = f"{read} and {limit} new ones are {most + limit}"
            raise LimitError(f"prompt {row}: {total}; the limit of this model is {longest} together")
        for token in options.stop_ids:
            self._check_id(token, "stop_ids")
        ends = frozenset({*told["eos"], *options.stop_ids})
        return rows, Rules(
            options, limit, ends, told["forced_bos"], told["forced_eos"], suppressed=tuple(told["suppressed"])
        )

    def _start(self, row: int, prompt: Sequence[int]) -> list[int]:
        """What the decoder reads first: the prompt, or the start behind a source."""
        told, ids = self._generation, [int(token) for token in prompt]
        if not ids and told["bos"] is not None and self._encoder is None:
            ids = [told["bos"]]
        if not ids:
            raise LimitError(f"prompt {row}: has no token, and this model names none to begin with")
        if self._encoder is None:
            for token in ids:
                self._check_id(token, f"prompt {row}")
            return ids
        if min(ids) < 0:
            raise LimitError(f"prompt {row}: token id {min(ids)} is below 0")
        if told["start"] is None:
            raise LimitError("manifest.json: generation names no token to start with behind a source")
        return [told["start"]]

    def _check_id(self, token: int, where: str) -> None:
        if not 0 <= token < self._graph.vocabulary:
            raise LimitError(f"{where}: token id {token}; the model takes 0..{self._graph.vocabulary - 1}")

    def _open(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], rules: Rules) -> _Batch:
        """Room for the rows and all that may follow, and what an encoder says of their sources."""
        real = _padded(rows)[1]
        mask = np.pad(real, ((0, 0), (0, rules.limit)), constant_values=1).astype(self._graph.mask_dtype)
        fixed = {} if self._encoder is None else self._encoded(prompts)
        cache, filled = self._cache(rows, mask.shape[1], rules.options.beams)
        return _Batch(self._graph, cache, mask, fixed, filled)

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> Arrays:
        """The decoder's inputs that stay the same, of sources padded on the right."""
        assert self._encoder is not None
        ids, mask = (np.flip(array, axis=1) for array in _padded([list(prompt)[::-1] for prompt in prompts]))
        feeds = {}
        for item in self._encoder.get_inputs():
            feeds[item.name] = np.ascontiguousarray(
                {"input_ids": ids, "attention_mask": mask}[item.name], _DTYPES[item.type]
            )
        outputs = [item.name for item in self._encoder.get_outputs()]
        found = dict(zip(outputs, self._encoder.run(outputs, feeds, self._run_options), strict=True))
        found["attention_mask"] = feeds["attention_mask"]
        return {name: array for name, array in found.items() if name in self._graph.inputs}

    def _cache(self, rows: Sequence[Sequence[int]], length: int, beams: int) -> tuple[_Cache, int]:
        """A cache, and how many of its positions are read: a single prompt may go on where the last one ended."""
        with self._taking:
            kept, self._kept = self._kept, None
        held = () if kept is None else kept.held
        goes_on = 0 < len(held) < len(rows[0]) and held == tuple(rows[0][: len(held)])
        if kept is not None and goes_on and len(rows) == beams == 1:
            return kept.lengthened(self._graph, length), len(held)
        if self._graph.shared:
            flat = kept.flat if isinstance(kept, _SharedCache) else None
            return _SharedCache(self._graph, len(rows) * beams, length, flat), 0
        return _GrowingCache(self._graph, len(rows)), 0

    def _keep(self, batch: _Batch, rows: Sequence[Sequence[int]]) -> None:
        """For the next call, with the ids that are in it where it holds a single prompt and its continuation."""
        batch.cache.held = tuple(rows[0][: batch.filled]) if len(rows) == 1 and self._encoder is None else ()
        self._kept = batch.cache


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask [rows, tokens], int64, padded on the left."""
    longest = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), longest), np.int64)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :], mask[row, longest - len(tokens) :] = tokens, 1
    return ids, mask


# ---- Beams

_NEVER = -1e9  # the score of a beam that isn't there yet


class _Search:
    """The beams of one prompt, as transformers 5 searches: twice as many candidates as beams at each step, more where
    several tokens end a row; of the best, those that end are finished, with a score that their length divides."""

    def __init__(self, start: list[int], rules: Rules) -> None:
        beams = rules.options.beams
        self._start, self._rules = len(start), rules
        self._running = [start] * beams
        self._scores = np.full(beams, _NEVER)
        self._scores[0] = 0  # all begin alike: only one of them counts
        self._finished: list[tuple[float, list[int]]] = []
        self.done = False
        self.origins = self.tokens = np.zeros(beams, np.int64)  # of each beam: the beam that it follows, its last token

    def advance(self, logits: np.ndarray) -> None:
        """One more token; logits [beams, vocabulary], or [1, vocabulary] of the start."""
        rules, beams, new = self._rules, len(self._running), len(self._running[0]) - self._start
        likely = np.broadcast_to(_log_softmax(logits), (beams, logits.shape[1]))
        found = [rules.scores(row, ids, new) for row, ids in zip(likely, self._running, strict=True)]
        totals = (np.stack(found) + self._scores[:, None]).ravel()
        _check_left(totals)
        best = _largest(totals, max(2, 1 + len(rules.eos)) * beams)
        origins, tokens = np.divmod(best, logits.shape[1])
        is_last = new + 1 == rules.limit
        ends = np.array([is_last or int(token) in rules.eos for token in tokens])
        for place in np.flatnonzero(ends[:beams]):
            self._finish(totals[best[place]], [*self._running[origins[place]], int(tokens[place])], new + 1)
        going = np.flatnonzero(~ends)[:beams]
        self.origins, self.tokens, self._scores = origins[going], tokens[going], totals[best[going]]
        self._running = [
            [*self._running[origin], int(token)] for origin, token in zip(self.origins, self.tokens, strict=True)
        ]
        self.done = is_last or self._is_settled(new + 1)

    def _finish(self, total: float, ids: list[int], new: int) -> None:
        beams = self._rules.options.beams
        self._finished.append((float(total) / new**self._rules.options.length_penalty, ids))
        self._finished = sorted(self._finished, key=lambda item: -item[0])[:beams]

    def _is_settled(self, new: int) -> bool:
        """Whether no running beam is expected to become better than the worst finished one."""
        options = self._rules.options
        is_full = len(self._finished) == options.beams
        worst = self._finished[-1][0] if is_full else _NEVER
        return (is_full and options.early_stopping) or not self._scores[0] / new**options.length_penalty > worst

    def best(self) -> list[int]:
        """The new ids of the best, without the one that ends it."""
        ids = self._finished[0][1][self._start :]
        return ids[:-1] if ids[-1] in self._rules.eos else ids


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)))


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest, largest first."""
    places = values.argpartition(-count)[-count:]
    return np.asarray(places[np.argsort(-values[places], kind="stable")])


# ---- Text as it comes


class TextStream:
    """Ids in, text out as soon as it is final: whole characters, and nothing that may be the start of a stop string.

    `decode` gives the text of ids. The text ends before the first of `stops`, and `stopped` is True from then on.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise LimitError("stop: an empty text would end every continuation at once")
        self.stopped = False
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []  # those of the last whole characters, and what came since
        self._known = 0  # how many of them are in the text
        self._text = ""  # held back

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final by these ids, which follow those before."""
        self._ids += ids
        return self._pass(is_end=False)

    def finish(self) -> str:
        """What was held back."""
        return self._pass(is_end=True)

    def _pass(self, is_end: bool) -> str:
        if self.stopped:
            return ""
        self._text += self._decoded(is_end)
        found = [place for place in map(self._text.find, self._stops) if place >= 0]
        if found:
            self.stopped, end = True, min(found)
        else:
            end = len(self._text) - (0 if is_end else self._begun())
        final, self._text = self._text[:end], self._text[end:]
        return final

    def _decoded(self, is_end: bool) -> str:
        """The new text. Ids are decoded behind the last ones before them, or a space between them might be lost."""
        before, text = self._decode(self._ids[: self._known]), self._decode(self._ids)
        if text.endswith("\ufffd") and not is_end:  # half a character
            return ""
        if len(text) > len(before):
            self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text[len(before) :]

    def _begun(self) -> int:
        """How many characters at the end may be the start of a stop string."""
        sizes = {size for stop in self._stops for size in range(1, len(stop)) if self._text.endswith(stop[:size])}
        return max(sizes, default=0)


# ---- Reading with a cache what stands there already, for checks


def logits_with_cache(run: Run | tuple[Run, Run], cache: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Logits [batch, tokens, vocabulary] at every position, read as a generation does: a prompt, a part, single steps.

    `cache` is the manifest's: layers, heads, head_dim. `arrays` holds input_ids and attention_mask [batch, tokens].
    Behind an encoder `run` is its own and the decoder's, and decoder_input_ids [batch, decoded] are read in parts.
    """
    if isinstance(run, tuple):
        encode, run = run
        source = {name: arrays[name] for name in ("input_ids", "attention_mask")}
        ids = arrays["decoder_input_ids"]
        fixed = {"attention_mask": source["attention_mask"], **encode(source)}
        mask = np.ones_like(ids)
    else:
        ids, mask, fixed = arrays["input_ids"], arrays["attention_mask"], {}
    past = _empty(cache, len(ids))
    found = []
    for start, end in _parts(ids.shape[1]):
        logits, past = read(run, ids[:, start:end], mask[:, :end], past, fixed)
        found.append(logits)
    return {"logits": np.concatenate(found, axis=1)}


def _parts(tokens: int) -> Iterator[tuple[int, int]]:
    """A prompt, then two tokens at once, then single ones, as far as there are so many."""
    steps = min(_STEPS, tokens - 1)
    part = 2 if tokens > steps + 2 else 0
    prompt = tokens - steps - part
    yield 0, prompt
    if part:
        yield prompt, prompt + part
    for end in range(prompt + part + 1, tokens + 1):
        yield end - 1, end


def _empty(cache: Mapping[str, Any], batch: int) -> Arrays:
    heads = cache.get("by_layer") or [cache["heads"]] * cache["layers"]
    shapes = [(batch, count, 0, cache["head_dim"]) for count in heads for _ in ("key", "value")]
    return {name: np.zeros(shape, np.float32) for name, shape in zip(names(cache, "past"), shapes, strict=True)}


def names(cache: Mapping[str, Any], what: str) -> list[str]:
    """Of the tensors of a cache, `what` is past, present or cross."""
    return [f"{what}.{layer}.{kind}" for layer in range(cache["layers"]) for kind in ("key", "value")]


def read(
    run: Run, ids: np.ndarray, mask: np.ndarray, past: Arrays, fixed: Mapping[str, np.ndarray] | None = None
) -> tuple[np.ndarray, Arrays]:
    """Logits of all new tokens, and the longer cache; `fixed` is what an encoder gave, and its mask.

    Several tokens on top of a cache go row by row: the fused operator takes one row then.
    """
    fixed, filled = fixed or {}, next(iter(past.values())).shape[2]
    if mask.shape[1] != filled + ids.shape[1]:
        total = f"past {filled} + new {ids.shape[1]} = {filled + ids.shape[1]}"
        raise LimitError(f"attention_mask: covers {mask.shape[1]} positions, not {total}")
    if len(ids) > 1 and ids.shape[1] > 1 and filled:
        rows = [
            read(run, _row(ids, row), _row(mask, row), _rows(past, row), _rows(fixed, row)) for row in range(len(ids))
        ]
        return np.concatenate([logits for logits, _ in rows]), {
            name: np.concatenate([present[name] for _, present in rows]) for name in past
        }
    prefix = "decoder_" if fixed else ""
    new = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask, "logits_at": np.arange(ids.shape[1])}
    outputs = run({**new, **fixed, **past})
    return outputs["logits"], {name: outputs[name.replace("past", "present", 1)] for name in past}


def _row(array: np.ndarray, index: int) -> np.ndarray:
    return array[index : index + 1]


def _rows(arrays: Mapping[str, np.ndarray], index: int) -> Arrays:
    return {name: _row(array, index) for name, array in arrays.items()}
