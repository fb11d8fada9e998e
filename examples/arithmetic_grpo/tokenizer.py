"""A task's tokenizer: one id per word, digit or symbol, 128 ids in all."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from examples.arithmetic_grpo import task as arithmetic
from examples.task import Task

VOCAB_SIZE = 128
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)


def token_ids(task: Task[Any] = arithmetic) -> dict[str, int]:
    """Token to id, for all 128 ids; the ids the task leaves over are ``<reserved_N>``."""
    tokens = [PAD, BOS, EOS, UNK, *task.vocabulary()]
    if len(tokens) > VOCAB_SIZE or len(set(tokens)) != len(tokens):
        raise ValueError(f"the task needs {len(tokens)} distinct tokens, limit {VOCAB_SIZE}")
    tokens += [f"<reserved_{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def build_tokenizer(task: Task[Any] = arithmetic) -> PreTrainedTokenizerFast:
    """Builds the tokenizer.

    Encoding puts ``<bos>`` in front unless ``add_special_tokens=False`` is passed; digits are split
    from one another; decoding joins tokens by single blanks, the task's own text form.
    """
    backend = Tokenizer(models.WordLevel(token_ids(task), unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(r"\d|->|[a-z]+|[^\sa-z\d]"), behavior="isolated"),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="right",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
