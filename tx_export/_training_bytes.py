"""A byte-level tokenizer, whose tokens decode to the text as it was (Sennrich et al. 2016, over bytes)."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tx_export._training_text import SPECIAL_TOKENS
from tx_export.errors import LoadError

__all__ = ["train_byte_tokenizer"]


def train_byte_tokenizer(texts: Sequence[str], vocab_size: int, template: str) -> Tokenizer:
    """Byte pairs of at most `vocab_size` entries; it writes the template, in which $A stands for the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if len(alphabet) + len(SPECIAL_TOKENS) > vocab_size:
        raise LoadError(
            f"vocab_size is {vocab_size}; bytes and special tokens need {len(alphabet) + len(SPECIAL_TOKENS)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    written = [(token, tokenizer.token_to_id(token)) for token in SPECIAL_TOKENS if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=written)
    return tokenizer
