"""The economics: costs, acceptance, generation, steps and the plan, against figures by hand."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from benchmarks.plan_published import rules
from benchmarks.plan_published.__main__ import read_rows
from benchmarks.plan_published.cells import H100_PCIE, SMALL_STEPS, shape_of
from draft_trainer.cli.main import main
from draft_trainer.cli.plan import served_costs
from draft_trainer.planning import Fleet, make_plan, read_lengths
from draft_trainer.server.web import WebServer
from slipstream.economics.arithmetic import (
    Loop,
    acceptance_length,
    best_length,
    break_even,
    check_rates,
    drift_that_pays,
    extended,
    generate,
    scaled,
    schedule,
    speed_up,
)
from slipstream.economics.costs import (
    OFF,
    Roofline,
    StepTable,
    eagle3_shape,
    hardware,
    policy_shape,
)
from slipstream.errors import RefusedError
from slipstream.serving.identity import Access, TokenFiles
from slipstream.serving.tls import TlsFiles, TlsPaths

pytestmark = pytest.mark.contract("economy")

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
ROWS = [(1, 0, 0.010), (8, 0, 0.012), (64, 0, 0.020)] + [
    (b, 3, s) for b, s in ((1, 0.016), (8, 0.020), (64, 0.060))
]
TABLE = StepTable.of(ROWS)
RATES = (0.8, 0.6, 0.4)


def plan_of(costs: StepTable, **fleet: Any) -> dict[str, Any]:
    """The plan of a loop that only generates, on measured costs."""
    told = {"costs_source": "by hand", "loop": Loop(0.0), "upkeep": 0.0}
    return make_plan(Fleet(costs=costs, **told, **fleet))


def test_step_table_is_linear_and_bounded() -> None:
    assert TABLE.draft_lengths == (OFF, 3)
    assert TABLE.seconds(OFF, 8) == 0.012
    assert TABLE.seconds(3, 36) == pytest.approx(0.040)
    assert TABLE.seconds(3, 0.5) == 0.016
    with pytest.raises(RefusedError, match=r"65, expected at most 64.*without speculation"):
        TABLE.seconds(OFF, 65)
    # A step without speculation is not vLLM's zero, in which the draft runs.
    for unknown in (0, 2):
        with pytest.raises(RefusedError, match=r"one of \[-1, 3\]"):
            TABLE.seconds(unknown, 1)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(1, 3, 0.1)], "plain steps"),
        ([(1, 0, -0.1)], "positive seconds"),
        ([(1, 0, math.nan)], "positive seconds"),
        ([(1, 0, 0.1), (1, 0, 0.2)], "twice"),
        ([(1, 0, 0.1), (8, 0, 0.05)], "do not fall"),
    ],
)
def test_step_table_invalid_rows_are_refused(
    rows: list[tuple[float, int, float]], text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        StepTable.of(rows)


def test_step_table_cheaper_larger_batch_is_noise() -> None:
    assert StepTable.of([(1, 0, 0.1), (8, 0, 0.097)]).seconds(OFF, 8) == 0.1


def test_acceptance_length_and_scaling() -> None:
    assert acceptance_length(RATES, 0) == acceptance_length(RATES, OFF) == 1
    assert acceptance_length(RATES, 3) == pytest.approx(2.8)
    # The last conditional acceptance, 0.4 / 0.6, goes on.
    assert extended(RATES, 5)[3:] == pytest.approx((0.4 * 2 / 3, 0.4 * 4 / 9))
    # Conditionals 0.8, 0.75, 2/3 halved: 0.4, 0.375, 1/3.
    assert scaled(RATES, 0.5) == pytest.approx((0.4, 0.15, 0.05))
    assert scaled((0.9, 0.9), 2) == (1, 1)
    assert acceptance_length((0.0, 0.0), 4) == 1
    assert check_rates([0.47, 0.8, 0.7]) == (0.47, 0.47, 0.47)
    for wrong in ([], [1.2], [float("nan")], [-0.1]):
        with pytest.raises(RefusedError, match="acceptance by position"):
            check_rates(wrong)


def test_speed_up_and_best_length() -> None:
    assert break_even(TABLE, 3, 1) == pytest.approx(1.6)
    assert speed_up(TABLE, RATES, 3, 1) == pytest.approx(2.8 / 1.6)
    assert best_length(TABLE, RATES, 1) == 3
    # Three times a plain step at 64 requests, for 2.8 tokens: better none. But a table has no such
    # choice, and what vLLM's zero costs is not known.
    assert speed_up(TABLE, RATES, 3, 64) < 1
    assert best_length(TABLE, RATES, 64) == 3
    zero = StepTable({**TABLE.points, 0: ((1, 0.011), (64, 0.021))})
    assert best_length(zero, RATES, 64) == 0
    rows = schedule(lambda batch: best_length(zero, RATES, batch), 64)
    assert [row[2] for row in rows] == [3, 0]
    assert rows[0][0] == 1
    assert rows[0][1] + 1 == rows[1][0]
    assert rows[1][1] == 64


def test_draft_length_0_costs_a_draft_run() -> None:
    costs = StepTable(
        {OFF: ((1, 0.1), (2, 0.1)), 0: ((1, 0.11), (2, 0.11)), 1: ((1, 0.12), (2, 0.3))}
    )

    def planned(rollouts: int) -> dict[str, Any]:
        return plan_of(costs, rates=(0.5,), lengths=[30], rollouts=rollouts, requests=2)

    # Thirty steps of two requests with a draft that proposes nothing, then one request with drafts.
    plan = planned(3)
    assert plan["num_speculative_tokens_per_batch_size"] == [[1, 1, 1], [2, 2, 0]]
    assert plan["arms"][-1]["generation"] == pytest.approx(30 * 0.11 + 20 * 0.12)
    # Two requests all the time: only without speculation is a step as fast as without.
    plan = planned(2)
    assert plan["num_speculative_tokens_per_batch_size"] == []
    assert plan["arms"][-1]["generation_speed_up"] == 1
    assert [row["best"] for row in plan["batches"]] == [None, None]
    assert plan["verdict"].startswith("Do not speculate")


@pytest.mark.parametrize(("slower", "limit"), [(1, 1.21), (3, None)])
def test_plan_without_length_0_states_an_upper_bound(slower: float, limit: float | None) -> None:
    """Most steps are full, where drafts lose; only the tail gains, or nothing."""
    plain = ((1, 0.010), (16, 0.011), (64, 0.014), (256, 0.024))
    drafted = ((1, 0.013), (16, 0.015), (64, 0.030), (256, 0.100))
    rows = [(b, 0, s) for b, s in plain] + [(b, 3, s * slower) for b, s in drafted]

    def planned(costs: StepTable) -> dict[str, Any]:
        lengths = read_lengths("lognormal:1000,1,16000")
        rates, sizes = (0.8, 0.65, 0.5), {"rollouts": 1536, "requests": 256, "steps": 2}
        return plan_of(costs, rates=rates, lengths=lengths, **sizes)

    unknown = planned(StepTable.of(rows))
    assert unknown["num_speculative_tokens_per_batch_size"] == []
    known = planned(StepTable({**StepTable.of(rows).points, 0: plain}))
    if limit is None:
        assert unknown["verdict"].startswith("Do not speculate")
        assert known["verdict"].startswith("Do not speculate")
    else:
        assert f"at most {limit:.2f}x as fast" in unknown["verdict"]
        # What a zero gives that takes as little as a step without drafts.
        assert known["arms"][-1]["generation_speed_up"] == unknown["speed_up_at_most"]
        assert known["speed_up_at_most"] is None


def test_generation_by_hand() -> None:
    flat = StepTable.of([(1, 0, 0.1), (2, 0, 0.1), (1, 1, 0.15), (2, 1, 0.15)])
    plain = generate(flat, (0.5,), [10, 30], lambda batch: OFF, slots=2)
    assert plain.seconds == pytest.approx(3.0)
    assert plain.mean_batch == pytest.approx((1.0 * 2 + 2.0 * 1) / 3)
    drafted = generate(flat, (0.5,), [10, 30], lambda batch: 1, slots=2)
    assert drafted.seconds == pytest.approx(30 / 1.5 * 0.15)
    # One slot: one after the other. A third rollout takes the slot of the first that ends.
    assert generate(flat, (0.5,), [10, 30], lambda batch: OFF, slots=1).seconds == pytest.approx(4)
    assert generate(flat, (0.5,), [10, 30, 5], lambda b: OFF, slots=2).seconds == pytest.approx(3)
    # Drafts of a lone request only.
    tail = generate(flat, (0.5,), [10, 30], lambda batch: 1 if batch == 1 else OFF, slots=2)
    assert tail.seconds == pytest.approx(1.0 + 20 / 1.5 * 0.15)
    with pytest.raises(RefusedError, match="at least one rollout"):
        generate(flat, (0.5,), [], lambda batch: OFF, slots=2)


def test_generation_context_is_prompt_and_output() -> None:
    class ByContext:
        draft_lengths = (0,)

        def seconds(self, k: int, batch: float, context: float) -> float:
            return context

    # One at a time: 4 tokens at a mean context of 100 + 2, then 2 at 100 + 1, then 6 at 100 + 3.
    found = generate(ByContext(), (0.5,), [4, 2, 6], lambda b: 0, slots=1, prompt_tokens=100)
    assert found.seconds == pytest.approx(4 * 102 + 2 * 101 + 6 * 103)


def test_loop_steps_overlap_from_lag_1() -> None:
    assert Loop(2.0).run([3.0] * 10) == (pytest.approx(5.0), pytest.approx(3.0))
    assert Loop(2.0, lag=1).run([3.0] * 10) == (pytest.approx(3.0), pytest.approx(1.0))
    # Training is the bottleneck: generation is hidden, however few the steps, however long it is.
    for steps, seconds in ((10, 180.1), (10, 100.0), (1, 180.1)):
        assert Loop(200.0, lag=1).run([seconds] * steps) == (200.0, 0.0)


def test_drift_that_pays() -> None:
    def seconds(rates: tuple[float, ...]) -> float:
        return 100 / acceptance_length(rates, 3)

    drift = drift_that_pays(seconds, RATES, 4.0)
    assert drift is not None
    assert seconds(scaled(RATES, 1 - drift)) == pytest.approx(seconds(RATES) + 4)
    assert drift_that_pays(seconds, RATES, 65.0) is None


def test_policy_shapes_and_roofline() -> None:
    shape = policy_shape(LLAMA)
    # 8.03e9 weights, less the embeddings, which are looked up.
    assert shape.dense_bytes / 2 == pytest.approx(8.03e9 - 128256 * 4096, rel=2e-3)
    assert shape.context_bytes == 131072
    assert policy_shape(LLAMA, gpus=4).dense_bytes == shape.dense_bytes / 4
    # Each GPU keeps a KV head, also where there are fewer of them.
    few = LLAMA | {"num_key_value_heads": 4}
    kept = [policy_shape(few, gpus).context_bytes for gpus in (2, 4, 8)]
    assert kept == [shape.context_bytes / 4, *[shape.context_bytes / 8] * 2]
    sparse = policy_shape(
        LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336}
    )
    assert sparse.step_bytes(1, 0) == pytest.approx(sparse.dense_bytes + sparse.expert_bytes / 4)
    assert sparse.step_bytes(1e6, 0) == pytest.approx(sparse.dense_bytes + sparse.expert_bytes)
    assert policy_shape({"text_config": LLAMA}) == shape
    # ERNIE's names; a shared expert is read at every step.
    named = LLAMA | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 14336}
    assert policy_shape(named) == sparse
    for more in ({"n_shared_experts": 1}, {"shared_expert_intermediate_size": 14336}):
        shared = policy_shape(named | more)
        assert shared.dense_bytes == pytest.approx(sparse.dense_bytes + sparse.expert_bytes / 8)
        assert shared.token_flops > sparse.token_flops
    for other in ({"kv_lora_rank": 512}, {"linear_num_key_heads": 16}):
        with pytest.raises(RefusedError, match="--server or --step-costs"):
            policy_shape({"text_config": LLAMA | other})
    with pytest.raises(RefusedError, match="moe_intermediate_size: "):
        policy_shape(named | {"moe_intermediate_size": [1536, 512]})
    with pytest.raises(RefusedError, match="no hidden_size"):
        policy_shape({"model_type": "llama"})
    with pytest.raises(RefusedError, match="--gpu: found V100"):
        hardware("V100")
    roofline = Roofline(hardware("h100"), shape, eagle3_shape(LLAMA, 32_000))
    costs = [roofline.seconds(k, 8, 1000) for k in roofline.draft_lengths]
    assert costs == sorted(costs)
    # A step without drafts, of a server that speculates: the draft runs once.
    assert costs[1] > costs[0] + roofline.draft_seconds + roofline.speculative_seconds


SMALL = {  # Qwen3-0.6B and SmolLM2-135M
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
SMALLER = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("config", [SMALL, SMALLER])
def test_step_of_small_policy_has_a_floor(config: dict[str, int]) -> None:
    """Launches alone take a millisecond, with drafts and without."""
    roofline = Roofline(hardware("h100"), policy_shape(config), eagle3_shape(config, 32_000))
    plain, drafted = (roofline.seconds(k, 1, 200) for k in (OFF, 3))
    assert 1.1e-3 < plain < 2.5e-3
    assert drafted > plain + 1e-3
    # Of a thousandth of the weights, it is the floor.
    tiny = config | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 256, "head_dim": 64}
    floor = roofline.layer_seconds * config["num_hidden_layers"]
    steps = Roofline(hardware("h100"), policy_shape(tiny), eagle3_shape(tiny, 256))
    assert steps.seconds(OFF, 1, 0) == pytest.approx(floor, rel=0.03)


@pytest.mark.parametrize(
    ("config", "options", "guess"),
    [
        (LLAMA, ["--gpu", "A100"], ""),
        (LLAMA, ["--gpu", "H100", "--requests", "64"], ""),
        (SMALL, ["--gpu", "H100"], "a policy of 0.6 billion weights"),
        (SMALLER, ["--gpu", "A100"], "a policy of 0.13 billion weights"),
        (LLAMA, ["--gpu", "B200"], "B200"),
        (LLAMA, ["--gpu", "A100", "--gpus-per-engine", "4"], "4 GPUs"),
        (LLAMA, ["--gpu", "A100", "--weight-bytes", "1"], "weights of 1 bytes"),
        (LLAMA, ["--gpu", "A100", "--requests", "128"], "128 requests"),
        (LLAMA | {"num_experts": 8}, ["--gpu", "A100"], "8 experts"),
    ],
)
def test_estimate_beyond_fitted_range_is_called_a_guess(
    config: dict[str, int],
    options: list[str],
    guess: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["plan", "--policy", f"{tmp_path}", "--lengths", "lognormal:100,1,500", *options]
    assert main([*argv, "--acceptance", "0.8,0.6", "--steps", "1"]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("A guess: ") == bool(guess)
    assert guess in verdict
    assert ("--server or --step-costs" in verdict) == bool(guess)


def test_published_steps_of_small_models_are_estimated() -> None:
    for model, requests, context, milliseconds in SMALL_STEPS:
        shape = shape_of(model)
        estimated = 1e3 * Roofline(H100_PCIE, shape, shape).seconds(OFF, requests, context)
        within = 0.17 if requests == 32 else 0.06
        assert estimated == pytest.approx(milliseconds, rel=within), (model, requests, context)


def test_planned_lengths_beat_sglang_table_on_published_steps() -> None:
    compared = rules.compare(read_rows())
    least = rules.least(compared)
    assert least[rules.BY_PLAN] > 0.99 and least[rules.BY_AUTO] > 0.98
    assert all(c[rules.BY_PLAN] >= c[rules.BY_SGLANG] - 0.01 for c in compared)


def test_read_lengths_and_step_costs(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("10\n20\n400\n")
    assert read_lengths(str(file)) == [10, 20, 400]
    file.write_text("[10, 20, 400]")
    assert read_lengths(str(file)) == [10, 20, 400]
    file.write_text("100 100 101")
    assert read_lengths(str(file), equal_lengths=True) == [100, 100, 101]
    with pytest.raises(RefusedError, match="a tail"):
        read_lengths(str(file))
    file.write_text("10 -3")
    with pytest.raises(RefusedError, match="positive ones"):
        read_lengths(str(file))
    file.write_text("ten")
    with pytest.raises(RefusedError, match="numbers of tokens"):
        read_lengths(str(file))
    with pytest.raises(RefusedError, match=r"--lengths: found .*No such file"):
        read_lengths(str(tmp_path / "absent"))
    with pytest.raises(RefusedError, match=r"step costs: found .*No such file"):
        StepTable.read(tmp_path / "absent")
    for damaged in (b"\xff\xfe\x00", b"x" * 200_000):
        file.write_bytes(damaged)
        with pytest.raises(RefusedError, match="step costs: found"):
            StepTable.read(file)
    with pytest.raises(RefusedError, match="lognormal:MEDIAN,SIGMA,CAP"):
        read_lengths("lognormal:2000,0.9")
    drawn = read_lengths("lognormal:2000,0.9,16384")
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(2000, rel=0.1)
    assert max(drawn) == 16384


def exposition(plain: int, zero_seconds: float = 0.012) -> str:
    name = "slipstream_rollout_"
    step = f'{name}engine_steps_total{{kind="%s",requests="%d",draft_length="%d"}} %g\n'
    seconds = f'{name}engine_step_seconds_total{{kind="%s",requests="%d",draft_length="%d"}} %g\n'
    rows = [
        ("plain", 1, 0, plain, 0.01),
        ("speculative", 1, 2, 200, 0.016),
        ("speculative", 1, 0, 100, zero_seconds),
        ("mixed", 1, 0, 90, 1),
    ]
    return (
        f"# TYPE {name}engine_steps counter\n"
        + "".join(step % (kind, n, k, count) for kind, n, k, count, _ in rows)
        + f"# TYPE {name}engine_step_seconds counter\n"
        + "".join(seconds % (kind, n, k, count * each) for kind, n, k, count, each in rows)
        + f"# TYPE {name}acceptance_per_position gauge\n"
        + f'{name}acceptance_per_position{{position="0"}} 0.8\n'
        + f'{name}acceptance_per_position{{position="1"}} 0.6\n'
    )


def test_plan_reads_costs_measured_by_server() -> None:
    table, rates = served_costs(exposition(plain=100))
    assert rates == (0.8, 0.6)
    found = [table.seconds(k, 1) for k in (OFF, 0, 2)]
    assert found == pytest.approx([0.01, 0.012, 0.016])
    # A server that chooses its draft length has taken five plain steps before it is ready.
    assert set(served_costs(exposition(plain=5))[0].draft_lengths) == {OFF, 0, 2}
    with pytest.raises(RefusedError, match=r"no plain steps, .*lengths \[0, 2\].*timed plain"):
        served_costs(exposition(plain=3))


def test_draft_length_0_costs_at_least_a_plain_step() -> None:
    """Noise does not make a table that never drafts faster than no speculation."""
    table, _ = served_costs(exposition(plain=5, zero_seconds=0.0097))
    assert table.seconds(0, 1) == table.seconds(OFF, 1) == 0.01
    plan = plan_of(table, rates=(0.3, 0.1), lengths=[100, 900], requests=1)
    assert plan["num_speculative_tokens_per_batch_size"] == []
    assert plan["verdict"].startswith("Do not speculate")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_plan_reads_local_server_without_proxy(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.security.certificates import Authority

    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = TlsFiles(TlsPaths(pair.certificate, pair.key), str) if scheme == "https" else None
    page = PlainTextResponse(exposition(plain=100))
    server = WebServer(page, Access(tls, TokenFiles({}, ""), {}), "127.0.0.1", 0)
    address = server.url.removeprefix("http://")
    assert address.startswith("https://") == (scheme == "https")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    lengths = ["--lengths", "lognormal:100,1,1000", "--requests", "1"]
    try:
        assert main(["plan", "--server", address, *lengths]) == 0, capsys.readouterr().err
        assert f"measured by {address}." in capsys.readouterr().out
    finally:
        server.close(10)


def test_step_table_pools_few_slow_steps() -> None:
    # Four slow steps of one request before a thousand of four and of 16.
    table = StepTable.measured([(16, 0, 0.02, 1000), (1, 0, 0.05, 4), (4, 0, 0.01, 996)])
    pooled = pytest.approx((4 * 0.05 + 996 * 0.01) / 1000)
    assert table.points == {0: ((1, pooled), (4, pooled), (16, 0.02))}
    assert StepTable.measured([(1, 0, 0.01, 5), (2, 0, 0.02, 5)]).points[0] == (
        (1, 0.01),
        (2, 0.02),
    )


def test_plan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.csv"
    lines = [f"{batch},{k},{seconds}" for batch, k, seconds in ROWS]
    costs.write_text("\n".join(["batch_size,num_draft_tokens,step_seconds", *lines]))
    draw = random.Random(1)
    lengths = tmp_path / "lengths"
    lengths.write_text("\n".join(f"{draw.lognormvariate(5, 1):.0f}" for _ in range(500)))
    argv = ["plan", "--step-costs", f"{costs}", "--lengths", f"{lengths}"]
    argv += ["--acceptance", "0.8,0.6,0.4", "--other-seconds", "5"]
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    upkeep = ["--training-seconds", "3", "--training-share", "0.5", "--publish-seconds", "0.5"]
    upkeep += ["--frozen-acceptance", "0.5,0.2,0.1"]
    assert main([*argv, *upkeep, "--json", f"{out}", "--page", f"{page}"]) == 0
    plan = json.loads(out.read_text())
    assert plan["inputs"]["upkeep_seconds"] == 2
    arms = {arm["name"]: arm for arm in plan["arms"]}
    assert plan["verdict"] in capsys.readouterr().out
    assert plan["num_speculative_tokens_per_batch_size"] == [[1, 64, 3]]
    best = arms["best k per batch"]
    assert best["generation"] <= min(
        arms["no speculation"]["generation"], arms["k = 3"]["generation"]
    )
    assert best["step"] == pytest.approx(best["generation"] + 5)
    saved = arms["frozen draft, best k per batch"]["step"] - best["step"]
    assert plan["saved_by_adapting"] == pytest.approx(saved)
    assert ("it pays" in plan["verdict"]) == (saved > 2)
    assert page.read_text().count("<table>") == 2
    # Without a frozen draft's acceptance it says how much must be lost.
    assert main([*argv, "--training-seconds", "0.2"]) == 0
    assert "has lost" in capsys.readouterr().out
    # Generation is hidden behind a training step that takes longer: no draft saves anything.
    assert main([*argv[:-1], "1e6", "--lag", "1"]) == 0
    assert "never pays" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ["plan", "--lengths", "lognormal:100,1,500", "--acceptance", "0.8", "--gpu", "H100"]
    for policy in (tmp_path, tmp_path / "config.json"):
        assert main([*given, "--policy", f"{policy}"]) == 0
    assert "estimated for 1 x H100" in capsys.readouterr().out
    assert main([*argv, "--gpu", "H100"]) == 2
    assert "--step-costs and --gpu" in capsys.readouterr().err
    assert main([*argv, "--requests", "65"]) == 2
    assert "the largest measured" in capsys.readouterr().err
    assert main([*argv, "--gpus-per-engine", "0"]) == 2
    assert "--gpus-per-engine: found 0" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as another:
        answer = threading.Thread(target=lambda: another.accept()[0].sendall(b"not HTTP\r\n\r\n"))
        answer.start()
        for address in ("localhost:abc", f"127.0.0.1:{another.getsockname()[1]}"):
            assert main(["plan", *argv[3:], "--server", address]) == 2
            assert "not --control-port" in capsys.readouterr().err
        answer.join(10)
    absent = str(tmp_path / "absent.json")
    assert main(["plan", *argv[3:], "--gpu", "H100", "--policy", absent]) == 2
    assert f"{absent}: found" in capsys.readouterr().err
