"""``draft-trainer init``: a draft for a policy, from nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slipstream.errors import RefusedError

DEFAULT_DRAFT_VOCAB = 32_000


def add_to(commands: Any) -> None:
    """Register the command. Nothing here loads torch: help answers at once."""
    parser = commands.add_parser(
        "init",
        help="make a draft for a policy from scratch",
        description="Makes an untrained EAGLE-3 draft that vLLM loads: sizes, lm_head and final "
        "norm from the policy, the draft vocabulary from the tokens that were recorded most often. "
        "Train it with draft-trainer fit, or with draft-trainer serve.",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        required=True,
        metavar="DIR",
        help="the policy's Hugging Face checkpoint (safetensors)",
    )
    parser.add_argument(
        "--states",
        type=Path,
        metavar="DIR",
        help="recorded states of the policy, to choose the draft vocabulary by; without them it is "
        "the policy's whole vocabulary",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the draft; must not exist"
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help=f"tokens that the draft can propose (default: {DEFAULT_DRAFT_VOCAB}, or all where "
        "there are fewer)",
    )
    parser.add_argument(
        "--aux-layers",
        type=_layers,
        metavar="L,L,L",
        help="policy layers whose output the draft reads, as numbers of layers passed (default: "
        "the recorded ones, or 2, n // 2 and n - 3)",
    )
    parser.add_argument(
        "--intermediate-size",
        type=int,
        metavar="N",
        help="width of the draft's MLP (default: the policy's)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random weights (default: 0)"
    )
    parser.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    import torch

    from draft_trainer.checkpoints.policy import read_policy, size_of
    from draft_trainer.drafters.eagle3.checkpoint import save_draft
    from draft_trainer.drafters.eagle3.initial import choose_draft_vocabulary, init_draft
    from draft_trainer.files import check_free, folder_written_whole
    from draft_trainer.offline.fit import Progress
    from draft_trainer.recordings.recording import Recording

    for name in ("draft_vocab", "intermediate_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise RefusedError(f"--{name.replace('_', '-')}", value, "at least 1", "raise it")
    check_free(arguments.out, "--out")
    policy = read_policy(arguments.policy)
    vocab = size_of(policy.config, "vocab_size")
    layers, ids, chosen = arguments.aux_layers, torch.arange(vocab), ""
    if arguments.states is not None:
        progress = Progress()
        recording = Recording(
            arguments.states,
            lambda done, total: progress.update(f"verifying recorded states {done / total:4.0%}"),
        )
        recording.check_policy(policy.config)
        layers = layers or recording.facts.aux_layer_ids
        recording.select_layers(layers)
        allowed, counts = recording.lm_head_ids(), recording.completion_token_counts()
        size = arguments.draft_vocab or min(DEFAULT_DRAFT_VOCAB, len(allowed))
        ids = choose_draft_vocabulary(counts, size, allowed)
        share = int(counts[ids].sum()) / max(int(counts.sum()), 1)
        chosen = f", {share:.2%} of the {int(counts.sum()):,} recorded completion tokens"
    elif arguments.draft_vocab not in (None, vocab):
        raise RefusedError(
            "--draft-vocab",
            arguments.draft_vocab,
            f"recorded states to choose the tokens by, or all {vocab} tokens",
            "give --states, or leave --draft-vocab out",
        )
    head = init_draft(
        policy,
        ids,
        aux_layer_ids=layers,
        intermediate_size=arguments.intermediate_size,
        seed=arguments.seed,
    )
    config = head.config
    with folder_written_whole(arguments.out) as temporary:
        save_draft(temporary, head)
    print(
        f"{arguments.out}: {sum(p.numel() for p in head.parameters()):,} parameters; auxiliary "
        f"states after layers {', '.join(map(str, config.aux_layer_ids))}; draft vocabulary "
        f"{len(ids):,} of {vocab:,} tokens{chosen}"
    )
    return 0


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2,18,33") from error
