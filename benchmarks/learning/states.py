"""States of a policy in a file, for runs and processes that train on the same ones."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draft_trainer.drafters.policy import PolicyHead
from examples.arithmetic_grpo.states import States
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb


def write_states(path: Path, states: States) -> None:
    """Write them, of a policy whose lm_head has no bias and makes the logits as they are."""
    headers = [sample.header.SerializeToString() for sample in states.samples]
    save_file(
        {
            "headers": torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8),
            "header_ends": torch.tensor(list(accumulate(map(len, headers), initial=0))),
            "blocks": torch.cat([sample.block[: sample.nbytes] for sample in states.samples]),
            "lm_head": states.head.lm_head_rows,
            "embed_tokens": states.head.embed_tokens,
        },
        path,
    )


def read_states(path: Path) -> States:
    """Read what ``write_states`` wrote."""
    tensors = load_file(path)
    data, blocks = tensors["headers"].numpy().tobytes(), tensors["blocks"]
    samples, start = [], 0
    for begin, end in pairwise(tensors["header_ends"].tolist()):
        sample = Sample(pb.VerifierStates.FromString(data[begin:end]), blocks[start:])
        samples.append(Sample(sample.header, blocks[start : start + sample.nbytes]))
        start += sample.nbytes
    return States(samples, PolicyHead(0, tensors["lm_head"], tensors["embed_tokens"]))
