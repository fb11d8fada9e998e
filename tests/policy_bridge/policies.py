"""Policies of every kind that a loop may train, tiny and random, and what each says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import peft
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from policy_bridge import ModulePaths
from policy_bridge.model import unwrapped
from tests.tiny import SIZES, tiny_qwen3

from .conftest import VOCAB
from .windows import LAYERS, Batch, Windows, micro_batches

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


def qwen3_moe(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **MOE, **changes}))


def checkpointed(reentrant: bool) -> PreTrainedModel:
    model = tiny_qwen3()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def adapted(**settings: object) -> nn.Module:
    """Rank 2; adapters that begin at random, so that they change what the policy computes."""
    given = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings}
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(r=2, **given))


class Block(nn.Module):
    """A decoder layer that knows nothing of Hugging Face and takes its input by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, *, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * torch.tanh(self.mix(x.cumsum(1)))


class Plain(nn.Module):
    """A policy of plain modules, its layers right under it; it returns a tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.out = nn.Linear(width, VOCAB)

    def states(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """The input of every layer, then the final state."""
        found = [self.table(ids)]
        for block in self.blocks:
            found.append(block(scale=0.5, x=found[-1]))
        return found

    def forward(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.out(self.states(ids)[-1])


PLAIN = ModulePaths(decoder_layers="blocks", lm_head="out", embed_tokens="table")
COMPILES = CompileCounterWithBackend("aot_eager")


def compiled_in_place() -> Plain:
    torch._dynamo.reset()
    model = Plain()
    for part in (*model.blocks, model.out):
        part.compile(backend=COMPILES)
    return model


def compiled_around() -> Plain:
    torch._dynamo.reset()
    model = Plain()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=COMPILES)
    return model


POLICIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen3": tiny_qwen3,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "tied": lambda: tiny_qwen3(tie_word_embeddings=True),
    "checkpointed": lambda: checkpointed(False),
    "checkpointed-reentrant": lambda: checkpointed(True),
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "ddp": lambda: DistributedDataParallel(tiny_qwen3()),
    "plain": Plain,
    "compiled-in-place": compiled_in_place,
    "compiled-around": compiled_around,
}
"""DDP needs a process group. FSDP2 is in ``sharded_process``, on two ranks."""


def check_states(windows: Windows, model: nn.Module, data: Batch) -> None:
    """Assert that what was captured is what the policy says of itself, at temperature 1."""
    *_, inner = unwrapped(model)
    # The same micro-batches: a product's last bits depend on its shape.
    for micro in micro_batches(data):
        with torch.no_grad():
            states, head = _states_of(inner, micro)
        for row, mask in enumerate(micro["attention_mask"].bool()):
            sample = windows.of_row(micro, row)
            final = states[-1][row][mask]
            assert torch.equal(sample.final_hidden, final)
            aux = torch.cat([states[layer][row][mask] for layer in LAYERS], -1)
            assert torch.equal(sample.aux, aux)
            with torch.no_grad():
                logits = head(final)[:-1]
            own = logits.gather(-1, sample.token_ids[1:, None].long()).squeeze(-1)
            torch.testing.assert_close(sample.sampled_logits[1:], own)
            torch.testing.assert_close(sample.sampled_logprobs[1:], own - logits.logsumexp(-1))


def _states_of(inner: nn.Module, micro: Batch) -> tuple[Sequence[torch.Tensor], nn.Module]:
    if isinstance(inner, Plain):
        return inner.states(micro["input_ids"]), inner.out
    given = {"input_ids": micro["input_ids"], "attention_mask": micro["attention_mask"]}
    return inner.model(**given, output_hidden_states=True).hidden_states, inner.lm_head
