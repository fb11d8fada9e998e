"""The sections to measure, each returning figures by name; ``__main__`` has the bounds of some.

A section that cannot be measured raises ``NotMeasuredError`` with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity

from benchmarks.draft_training.case import Case
from benchmarks.gpu.bench import Bench, Figures, K, NotMeasuredError, draft_of, rollouts
from benchmarks.workers import TIED
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.batch import batches
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.loss import Objective, step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.training.learner import Learner
from draft_trainer.training.training_state import HostCopies
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1 import release_pb2

_DRILLS = 3
_LEFT_BYTES = 200 << 20
_FILL = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(kept.nbytes, flush=True)
sys.stdin.read()
"""


def ceilings(bench: Bench) -> Figures:
    """Measure the machine's limits for the other sections: products, copies, launches."""
    size, count = (128, 1 << 20) if bench.tiny else (8192, 1 << 30)
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    there, other = (torch.zeros(count, dtype=torch.uint8, device=bench.device) for _ in range(2))
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=bench.cuda)
    one = torch.zeros(1, device=bench.device)

    def launches() -> None:
        for _ in range(100):
            one.add_(1.0)

    found = {
        "product_flops": 2 * size**3 / bench.seconds(lambda: a @ b, 20),
        "device_copy_bytes": 2 * count / bench.seconds(lambda: other.copy_(there)),
        "to_host_bytes": count / bench.seconds(lambda: host.copy_(there, non_blocking=True)),
        "to_device_bytes": count / bench.seconds(lambda: there.copy_(host, non_blocking=True)),
    }
    return {**found, "seconds_a_launch": bench.seconds(launches) / 100}


def _pass(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Objective, torch.Tensor]:
    """One pass forward and backward; the objective, and all gradients as one CPU vector."""
    draft = draft_of(case, torch.device("cpu")).to(device)
    samples, heads = rollouts(case)
    (batch,) = batches(samples, heads, case.rows * case.tokens, device)
    valid = valid_targets(batch, K)
    outcome = ttt_objective(draft, batch, valid, weights=step_weights(K, 0.8), compute_dtype=dtype)
    outcome.loss.backward()
    grads = [p.grad.flatten().cpu().double() for p in draft.parameters() if p.grad is not None]
    return outcome, torch.cat(grads)


def parity(bench: Bench) -> Figures:
    """Loss, gradients and the gate's figure against float64 and float32 on the CPU."""
    case, cpu = bench.parity_case, torch.device("cpu")
    exact, expected = _pass(case, cpu, torch.float64)
    found, gradients = _pass(case, bench.device, torch.bfloat16 if bench.cuda else torch.float32)
    samples, heads = rollouts(case)
    lengths = [
        expected_acceptance(
            draft_of(case, cpu).to(device), samples, heads, K, "probabilistic"
        ).acceptance_length
        for device in (cpu, bench.device)
    ]
    cosine = torch.nn.functional.cosine_similarity(expected, gradients, dim=0)
    return {
        "relative error of the loss": abs(
            float(found.loss.detach()) / float(exact.loss.detach()) - 1.0
        ),
        "cosine of the gradients": float(cosine),
        "relative error of the gradients' norm": abs(float(gradients.norm() / expected.norm()) - 1),
        "difference of the acceptance length": abs(lengths[1] - lengths[0]),
    }


def waits(bench: Bench) -> Figures:
    """Check that no pass waits for the GPU: torch raises at the first operation that would."""
    case = bench.case
    draft = draft_of(case, bench.device)
    samples, heads = rollouts(case)
    (batch,) = batches(samples, heads, case.rows * case.tokens, bench.device)
    valid = valid_targets(batch, K)

    def once() -> None:
        outcome = ttt_objective(
            draft, batch, valid, weights=step_weights(K, 0.8), compute_dtype=case.torch_dtype
        )
        outcome.loss.backward()
        draft.zero_grad(set_to_none=True)

    seconds = bench.seconds(once, 2)
    figures: Figures = {"seconds_a_pass": seconds, "peak GB of a pass": None}
    peak = bench.peak_bytes(once)
    if peak is not None:
        figures["peak GB of a pass"] = peak / 1e9
        torch.cuda.set_sync_debug_mode("error")
        try:
            once()
            figures["passes that wait"] = 0
        except RuntimeError as error:
            figures |= {"passes that wait": 1, "waited_for": str(error)}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return figures


def gate(bench: Bench) -> Figures:
    """A candidate's estimate on 8,192 held-out tokens."""
    case = bench.case
    draft = draft_of(case, bench.device)
    samples, heads = rollouts(case)

    def once() -> None:
        expected_acceptance(draft, samples, heads, K, "probabilistic")

    peak, seconds = bench.peak_bytes(once), bench.seconds(once, 1)
    tokens = case.rows * case.tokens
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak GB of the gate": None if peak is None else peak / 1e9,
    }


def training(bench: Bench) -> Figures:
    """A step alone."""
    case = bench.case
    alone = _draft_training(bench, "", bench.seconds_left)
    seconds = alone["contestants"]["ours"]["seconds"]["median"]
    return {
        "case": alone,
        "tokens_a_second": case.rows * case.tokens / seconds,
        "share of the products' ceiling": training_flops(case)
        / seconds
        / bench.ceilings["product_flops"],
    }


def profile(bench: Bench) -> Figures:
    """The operations that take most of a step's time: calls, and milliseconds on the device."""
    samples, heads = rollouts(bench.case)
    learner = Learner(draft_of(bench.case, bench.device), _config(bench))
    learner.step(samples, heads)
    activities = [ProfilerActivity.CUDA if bench.cuda else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        begin = time.perf_counter()
        learner.step(samples, heads)
        bench.wait()
        seconds = time.perf_counter() - begin
    which = f"self_{'device' if bench.cuda else 'cpu'}_time_total"
    spent = {
        event.key: (event.count, getattr(event, which) / 1e3) for event in profiler.key_averages()
    }
    longest = sorted(spent, key=lambda key: spent[key][1], reverse=True)
    return {
        "ms": 1e3 * seconds,
        "ms_on_the_device": sum(ms for _, ms in spent.values()),
        "operations": {key: spent[key] for key in longest[:40]},
    }


def beside(bench: Bench, peer: str, share: float) -> Figures:
    """A step beside a peer's, in a share of the seconds that are left."""
    if bench.tiny:
        raise NotMeasuredError("a self-check installs no peers")
    found = _draft_training(bench, peer, share * bench.seconds_left)
    return {"case": found, f"speed against {peer}": found["speed_against"][peer]["median"]}


def _draft_training(bench: Bench, peer: str, seconds: float) -> Figures:
    """The figures of ``benchmarks.draft_training`` on the case, against one peer or none."""
    case = replace(bench.case, name="gpu")
    out = bench.folder / f"training-{peer or 'alone'}.json"
    options = [f"--against={peer}", "--cases=gpu", f"--ttt-steps={K}", f"--json={out}"]
    options += [f"--device={bench.device.type}", f"--dtypes={case.dtype}", "--rounds=7"]
    script = (
        "import sys; from benchmarks.draft_training import __main__ as m, case;"
        f"case.SHAPES['gpu'] = case.Case(**{case.to_dict()!r}); sys.exit(m.main(sys.argv[1:]))"
    )
    run_group([sys.executable, "-c", script, *options], seconds)
    if not out.exists():
        raise NotMeasuredError("benchmarks.draft_training wrote no figures: see its log above")
    (found,) = json.loads(out.read_text())["cases"]
    return dict(found)


def run_group(command: Sequence[str], seconds: float) -> None:
    """Run a command to its end; afterwards no process of its group is left.

    Raises:
        NotMeasuredError: it was not done in time.
    """
    process = subprocess.Popen([*TIED, *command], stdout=sys.stderr, start_new_session=True)
    try:
        process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired as error:
        raise NotMeasuredError(f"not done in {seconds:.0f} s") from error
    finally:
        # Workers would end by themselves only after their step, on the GPU of the next section.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def training_flops(case: Case) -> float:
    """Count the FLOPs of a step's products: backward twice the forward, the teacher's once."""
    hidden, heads = case.hidden_size, case.num_attention_heads * case.head_dim
    projected = heads + 2 * case.num_key_value_heads * case.head_dim
    layer = hidden * (projected + heads + 3 * case.intermediate_size + case.draft_vocab_size)
    once = hidden * (projected + 3 * hidden)
    tokens, steps = case.rows * case.tokens, case.ttt_steps
    attention = steps * 2 * heads * case.tokens / 2
    teacher = hidden * case.draft_vocab_size
    return tokens * (6.0 * (steps * layer + once + attention) + 2.0 * teacher)


def states(bench: Bench) -> Figures:
    """A training state on its way to the host: what the training thread pays, and the rate."""
    learner = Learner(draft_of(bench.case, bench.device), _config(bench))
    copies, tensors = HostCopies(), learner.tensors
    nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def once() -> float:
        bench.wait()
        begin = time.perf_counter()
        _, copied = copies.take(tensors, bench.device)
        called = time.perf_counter() - begin
        if copied is not None:
            copied.synchronize()
        return called

    once()
    begin = time.perf_counter()
    called = once()
    rate = nbytes / (time.perf_counter() - begin)
    return {
        "bytes": nbytes,
        "seconds of the training thread": called,
        "bytes_a_second": rate,
        "share of the pinned copy's rate": rate / bench.ceilings["to_host_bytes"],
    }


def memory(bench: Bench) -> Figures:
    """Steps on a GPU that something else fills: halved, refused without a change, and recovered."""
    if not bench.cuda:
        raise NotMeasuredError("a CPU's memory is not bounded")
    case = bench.case
    samples, heads = rollouts(case)
    learner = Learner(draft_of(case, bench.device), _config(bench))
    learner.step(samples, heads)
    whole = bench.peak_bytes(lambda: learner.step(samples, heads)) or 0
    outcomes: dict[str, int] = {"whole": 0, "halved": 0, "refused": 0, "recovered": 0}
    for share in (1.2, 0.75, 0.1):
        for _ in range(_DRILLS):
            torch.cuda.empty_cache()
            free, _total = torch.cuda.mem_get_info(bench.device)
            other = torch.empty(
                max(free - int(share * whole), 0), dtype=torch.uint8, device=bench.device
            )
            outcomes[_step(learner, samples, heads)] += 1
            del other
            outcomes["recovered"] += not learner.step(samples, heads).skipped
    return {"outcomes": outcomes, "drills survived": outcomes["recovered"] / (3 * _DRILLS)}


def _step(learner: Learner, samples: Sequence[Sample], heads: PolicyHeads) -> str:
    """Take a step; returns "whole", "halved" or, for too little memory, "refused"."""
    try:
        return "halved" if learner.step(samples, heads).memory_retries else "whole"
    except RefusedError as error:
        if error.reason != release_pb2.REFUSAL_REASON_DEVICE_MEMORY:
            raise
        return "refused"


def filled(bench: Bench) -> Figures:
    """The first step of a process, on a GPU that another process has filled, and the one after."""
    if not bench.cuda:
        raise NotMeasuredError("a CPU's memory is not bounded")
    samples, heads = rollouts(bench.case)
    learner = Learner(draft_of(bench.case, bench.device), _config(bench))
    command = [sys.executable, "-c", _FILL, str(_LEFT_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        # The process reads to the end of its input, which is where this block ends.
        assert other.stdout is not None
        filled_bytes = int(other.stdout.readline())
        first = _step(learner, samples, heads)
    recovered = not learner.step(samples, heads).skipped
    return {
        "filled_bytes": filled_bytes,
        "first_step": first,
        "first steps recovered": int(recovered),
    }


def _config(bench: Bench) -> TrainingConfig:
    case = bench.case
    return TrainingConfig(
        device="cuda" if bench.cuda else "cpu",
        ttt_steps=K,
        forward_tokens=case.rows * case.tokens,
    )
