"""One draft of an in-process vLLM engine, with the logits it was drawn from.

Run as a process of its own (``python -m tests.alignment.vllm_draft JSON``): an engine in the test's
process would keep its memory and threads until the end of the session.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams


def main(job: dict) -> None:
    """Draft greedily once after the prompt and write what was seen to ``job["out"]``."""
    llm = LLM(
        job["policy"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        speculative_config={
            "method": "eagle3",
            "model": job["release"],
            "num_speculative_tokens": job["k"],
            "draft_sample_method": "greedy",
        },
    )
    engine = llm.llm_engine.engine_core.engine_core
    runner = engine.model_executor.driver_worker.worker.model_runner
    draft = runner.drafter.model
    seen: list[torch.Tensor] = []
    compute_logits = draft.compute_logits

    def recording(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden_states)
        seen.append(logits[0].clone())
        return logits

    draft.compute_logits = recording
    prompt = {"prompt_token_ids": job["prompt"]}
    # Two tokens: the prefill samples the first and drafts; a request for one would not draft.
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    targets = torch.arange(draft.config.draft_vocab_size) + draft.draft_id_to_target_id
    logits = seen[: job["k"]]
    save_file(
        {
            "first": torch.tensor(answer[0].outputs[0].token_ids[0]),
            "drafts": torch.stack([row.argmax() for row in logits]),
            **{f"logits{step}": row[targets].float() for step, row in enumerate(logits)},
        },
        job["out"],
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
