"""What the Hugging Face families share: which keys of a config.json they read, find harmless, or refuse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

from tx_export.errors import LoadError
from tx_export.spec import CheckpointSpec

__all__ = ["read_fields", "read_labels", "read_task", "renamed_module"]

TaskT = TypeVar("TaskT", bound=str)

# Keys that never change what a model in eval mode computes.
_HARMLESS = re.compile(
    r"""
    _name_or_path | name_or_path | _commit_hash | model_type | architectures | transformers_version | finetuning_task
    | id2label | label2id | _?num_labels | problem_type | task_specific_params | tokenizer_class | prefix
    | _?attn_implementation(_\w+)? | torch_dtype | dtype | use_bfloat16 | torchscript | tf_legacy_loss
    | sentence_transformers | sbert_ce_default_activation_function | use_cache
    | sinusoidal_pos_embds | qa_dropout | tie_weights_ | summary_\w+ | generator_size
    | (use_)?return_dict(_in_generate)? | output_(attentions|hidden_states|past|scores)
    | chunk_size_feed_forward | gradient_checkpointing | initializer_range | directionality
    | pooler_(type|fc_size|num_attention_heads|num_fc_layers|size_per_head)
    | \w+_token_id | (bad_words|(begin_)?suppress_tokens)(_ids)? | (max|min)_length
    | num_(beams|beam_groups|return_sequences)
    | (diversity|repetition|length|exponential_decay_length)_penalty | no_repeat_ngram_size | temperature | top_[kp]
    | typical_p | do_sample | early_stopping | remove_invalid_values
    """,
    re.VERBOSE,
)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (NoneType,),
}


def read_fields(
    spec: type[CheckpointSpec],
    config: Mapping[str, Any],
    derived: Collection[str],
    fixed: Mapping[str, object],
    keys: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The spec's fields that config.json holds; `derived` ones are not keys of it, `fixed` keys have one value.

    `keys` holds the key of a field where it has another name than the field. A key that is neither known nor harmless
    is refused, unless it is null, false, zero or empty.
    """
    family = spec.__module__.rpartition(".")[2].replace("_", "-")
    fields = {
        keys.get(field.name, field.name): field
        for field in dataclasses.fields(spec)  # type: ignore[arg-type]
        if field.name not in derived
    }
    for key, value in config.items():
        if key in fixed:
            if value not in (fixed[key], None):
                raise LoadError(f"config.json: {key} is {value!r}; {family} supports {fixed[key]!r} only")
        elif key in fields:
            _check_kind(key, str(fields[key].type), value)
        elif value and not _HARMLESS.fullmatch(key):
            raise LoadError(
                f"config.json: {key} is {_shortened(value)}, which {family} does not support; "
                "supported: leaving it out (remove the key if it does not change what the model computes)"
            )
    return {fields[key].name: value for key, value in config.items() if key in fields}


def read_task(
    config: Mapping[str, Any], task: str | None, architectures: Mapping[str, TaskT], tasks: Collection[TaskT]
) -> TaskT:
    """The task asked for, else that of the first architecture; LoadError lists the tasks."""
    if task is not None:
        if task not in tasks:
            raise LoadError(f"task {task!r} is unknown here; supported: {', '.join(sorted(tasks))}")
        return next(known for known in tasks if known == task)
    named = config.get("architectures") or ["nothing"]
    found = architectures.get(str(named[0])) if isinstance(named, list) else None
    if found is None:
        raise LoadError(
            f"config.json: architectures is {_shortened(named)}; supported: {', '.join(sorted(architectures))}, "
            f"or choose with --task: {', '.join(sorted(tasks))}"
        )
    return found


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels in the order of their ids; LABEL_0, LABEL_1 (num_labels of them) where config.json has none."""
    named, count = config.get("id2label"), config.get("num_labels")
    if count is not None:
        _check_kind("num_labels", "int", count)
    if not named:
        return tuple(f"LABEL_{index}" for index in range(2 if count is None else count))
    try:
        labels = {int(index): str(label) for index, label in named.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise LoadError(f"config.json: id2label is {_shortened(named)}; expected numbers and their labels") from error
    if sorted(labels) != list(range(len(labels))):
        raise LoadError(f"config.json: id2label has the ids {sorted(labels)[:10]}; expected 0 to {len(labels) - 1}")
    if count is not None and count != len(labels):
        raise LoadError(f"config.json: num_labels is {count}, but id2label has {len(labels)} labels")
    return tuple(labels[index] for index in sorted(labels))


def renamed_module(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name in our module; `names` holds a checkpoint's modules and ours, N for the number of a layer.

    Old checkpoints call the weight and bias of a norm gamma and beta. A name that isn't known stays.
    """
    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", module)
    general = re.sub(r"\.\d+\.", ".N.", module, count=1)
    ours = names.get(module, names.get(general))
    if ours is None:
        return name
    if number is not None:
        ours = ours.replace(".N.", f".{number[1]}.")
    return f"{ours}.{ {'gamma': 'weight', 'beta': 'bias'}.get(kind, kind) }"


def _check_kind(key: str, annotation: str, value: object) -> None:
    kinds = [kind.strip() for kind in annotation.split("|")]
    allowed = tuple(kind for name in kinds for kind in _KINDS[name])
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
        expected = " or ".join(kinds).replace("None", "null")
        raise LoadError(f"config.json: {key} is {_shortened(value)}; expected {expected}")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
