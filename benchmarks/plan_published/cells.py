"""Published cells that give their inputs, each with the prediction from them.

A cell is predicted from other cells of its own table, by the one law that connects them: Amdahl's
for a step around a faster generation; AL / c for a speed-up, where c is taken from another cell of
the same workload; a cost that is a line in k, where two of its cells are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.economics.arithmetic import Loop
from slipstream.economics.costs import (
    OFF,
    Hardware,
    ModelShape,
    Roofline,
    eagle3_shape,
    hardware,
    policy_shape,
)

CONFIGS = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, 64),
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, 151936, 128),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, 128),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, 151936, 128),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, 128),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, 128),
    "Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128256, 128),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, 128),
}
H100_PCIE = Hardware("H100 PCIe", 756e12, 2.0e12)
SMALL_STEPS = [
    *[("Qwen2.5-0.5B", 1, n, ms) for n, ms in ((192, 1.677), (4160, 1.689), (16448, 1.732))],
    *[("Qwen2.5-0.5B", 8, n, ms) for n, ms in ((192, 1.725), (4160, 1.854), (16448, 2.528))],
    *[("Qwen2.5-0.5B", 32, n, ms) for n, ms in ((192, 2.148), (4160, 2.885), (16448, 6.074))],
    *[("Qwen3-1.7B", 1, n, ms) for n, ms in ((192, 3.199), (4160, 3.446), (16448, 4.193))],
]
"""Model, requests, tokens of past on average and milliseconds of a step of vLLM with FlashAttention
3 on one H100 PCIe: vLLM's pull request 53060, August 2026."""

OLDER = (
    "an engine of 2024 or 2025, whose step takes {0:.1f} ms more than the estimate, which is "
    "fitted to vLLM of August 2026"
)
PAPER = "arXiv 2604.26779"
THINK = (
    "published AL / speed-up is 1.81 for the DAPO draft and 2.02 for the weak one, a draft of the "
    "same size: the published generation includes time that engine steps do not explain"
)
FIXED = "a step with drafts has a fixed overhead that a line through such steps puts into k = 0"


@dataclass(frozen=True)
class Cell:
    """One published figure and what the model says it is."""

    source: str
    name: str
    published: float
    predicted: float
    reason: str = ""
    """The reason why it is off by more than a tenth."""

    @property
    def error(self) -> float:
        """The relative error, signed."""
        return self.predicted / self.published - 1


def _step(plain_step: float, plain_generation: float, generation: float) -> float:
    """Seconds of a synchronous step whose generation takes ``generation`` seconds instead."""
    return Loop(plain_step - plain_generation).run([generation] * 4)[0]


def _line(low: tuple[int, float], high: tuple[int, float], k: int) -> float:
    return low[1] + (high[1] - low[1]) * (k - low[0]) / (high[0] - low[0])


def _lengths_of_the_paper() -> list[Cell]:
    """k = 3: the cost of a speculative step from the DAPO draft's cell, frozen."""
    rows = {
        "RL-Zero": ((3.32, 1.77), {"weak frozen": (2.88, 1.51), "weak online": (3.04, 1.63)}),
        "RL-Think": ((2.77, 1.53), {"weak frozen": (2.40, 1.19), "weak online": (2.55, 1.26)}),
    }
    rows["RL-Zero"][1]["online"] = (3.29, 1.78)
    rows["RL-Think"][1]["online"] = (2.74, 1.52)
    return [
        Cell(
            PAPER,
            f"{workload}, {name} draft, k = 3: generation",
            gain,
            length * known[1] / known[0],
            THINK if workload == "RL-Think" and name.startswith("weak") else "",
        )
        for workload, (known, cells) in rows.items()
        for name, (length, gain) in cells.items()
    ]


def _simulator_of_the_paper() -> list[Cell]:
    """The share of generation from the first cell (2.72x, 1.70x); the others by Amdahl's law."""
    share = (1 - 1 / 1.70) / (1 - 1 / 2.72)
    return [
        Cell(PAPER, f"235B on 512 GPUs, {name}: step", step, 1 / _step(1, share, share / rollout))
        for name, rollout, step in (("k = 7", 4.07, 1.96), ("best cell", 6.49, 2.22))
    ]


def _speeds_by_length() -> list[Cell]:
    """Cost at the shortest and longest k; the cells between by a line."""
    cells = []
    lengths = {
        "EAGLE": (2.10, 2.29, 2.39, 2.43, 2.45, 2.47),
        "EAGLE-3": (2.36, 2.79, 3.08, 3.32, 3.46, 3.54),
    }
    tpot = {
        "EAGLE": (4.37, 4.29, 4.48, 4.71, 4.94, 5.20),
        "EAGLE-3": (4.32, 4.09, 4.05, 4.13, 4.20, 4.29),
    }
    for name, found in lengths.items():
        steps = [length * ms for length, ms in zip(found, tpot[name], strict=True)]
        cells += [
            Cell(
                "vllm-project/vllm 20780",
                f"Llama-3.1-8B, {name}, k = {k}: ms a token",
                tpot[name][k - 2],
                _line((2, steps[0]), (7, steps[-1]), k) / found[k - 2],
            )
            for k in range(3, 7)
        ]
    plain, one, seven = 447.2, 1.85 / 594.7, 4.52 / 732.3
    predicted = 3.04 / _line((1, one), (7, seven), 3)
    cells.append(
        Cell("sgl-project/sglang 23336", "GLM-4.7-FP8 MTP, k = 3: tok/s", 767.8, predicted)
    )
    cells.append(
        Cell(
            "sgl-project/sglang 23336",
            "GLM-4.7-FP8 MTP, no drafts: tok/s",
            plain,
            1 / _line((1, one), (7, seven), 0),
            FIXED,
        )
    )
    return cells


def config_of(model: str) -> dict[str, int]:
    """Return the sizes in a model's config.json."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("intermediate_size", "vocab_size", "head_dim")
    return dict(zip((*names, *more), CONFIGS[model], strict=True))


def shape_of(model: str) -> ModelShape:
    """Return a model's shape."""
    return policy_shape(config_of(model))


def _estimated_steps() -> list[Cell]:
    """Steps of one request without drafts that the roofline is not fitted to."""
    cells = []
    for source, gpu, context, found in (
        ("vllm-project/vllm 20780", "H100", 500, {"Llama-3.1-8B": 7.07}),
        ("vllm-project/vllm 16937", "H100", 500, {"Llama-3.1-8B": 1e3 / 133}),
        (
            "Qwen2.5 speed benchmark, vLLM 0.6.3",
            "A100",
            1025,
            {
                "Qwen2.5-0.5B": 1e3 / 311.55,
                "Qwen2.5-1.5B": 1e3 / 183.33,
                "Qwen2.5-3B": 1e3 / 127.61,
                "Qwen2.5-7B": 1e3 / 84.28,
            },
        ),
        ("Qwen3 speed benchmark, SGLang 0.4.6", "H20", 1025, {"Qwen3-0.6B": 1e3 / 414.17}),
    ):
        for model, milliseconds in found.items():
            config = config_of(model)
            costs = Roofline(hardware(gpu), shape_of(model), eagle3_shape(config, 32_000))
            predicted = 1e3 * costs.seconds(OFF, 1, context)
            more = milliseconds - predicted
            reason = OLDER.format(more) if "speed benchmark" in source else ""
            name = f"{model} on {gpu}, no drafts: ms a step"
            cells.append(Cell(source, name, round(milliseconds, 3), predicted, reason))
    return cells


def _estimated_speed_ups() -> list[Cell]:
    """Speed-ups of one request that the overheads of drafting are fitted to: lengths of the table,
    steps of the roofline."""
    lengths = {2: (2.36, 4.32), 3: (2.79, 4.09), 5: (3.32, 4.13), 7: (3.54, 4.29)}
    config = config_of("Llama-3.1-8B")
    costs = Roofline(hardware("H100"), shape_of("Llama-3.1-8B"), eagle3_shape(config, 32_000))
    plain = costs.seconds(OFF, 1, 500)
    return [
        Cell(
            "vllm-project/vllm 20780",
            f"Llama-3.1-8B on H100, EAGLE-3, k = {k}: speed-up, estimated",
            round(7.07 / ms, 3),
            length * plain / costs.seconds(k, 1, 500),
        )
        for k, (length, ms) in lengths.items()
    ]


def published_cells() -> list[Cell]:
    """All of them."""
    return [
        Cell(PAPER, "RL-Think: seconds of a step", 137.4, _step(185.3, 133.6, 87.0)),
        Cell(PAPER, "RL-Zero: seconds of a step", 107.5, _step(151.2, 100.0, 56.6)),
        Cell(PAPER, "RL-Think, asynchronous: seconds of a step", 60.5, 75.0 - 10.4 + 0.6),
        *_lengths_of_the_paper(),
        *_simulator_of_the_paper(),
        *_speeds_by_length(),
        Cell("SkyRL spec_decode.mdx", "Qwen3.5-9B MTP: step", 246.8, _step(400.7, 310.1, 152.4)),
        Cell("marin 9079", "step speed-up at 70 % waiting", 1.42, 1 / _step(1, 0.7, 0.7 / 1.61)),
        *_estimated_steps(),
        *_estimated_speed_ups(),
    ]


NOT_PREDICTED = {
    "arXiv 2604.26779, n-gram": "one cell a workload, so no second one to take its cost from",
    "arXiv 2604.26779, k = 5 and 7": "one cell a workload and length, likewise",
    "arXiv 2604.26779, 2048 GPUs": "the share of generation at lag 2 is not given",
    "vllm-project/vllm 16937, with drafts": "no acceptance length",
    "vllm-project/vllm 52228, 52992": "tokens verified differ by request, their cost is not given",
    "sgl-project/sglang 22246, 36136": "no acceptance length and no run without drafts",
    "sgl-project/sglang 21599": "no draft lengths",
    "sgl-project/sglang-jax 1632": "no acceptance length",
    "arXiv 2602.05145 (TIDE)": "no acceptance length for the speed-ups",
    "vllm-project/vllm 24243": "one draft length a concurrency",
}
"""The reasons why the other cells are not."""

MEASURED_COST = {
    "k = 3": (3.0, (1.8, 2.0)),
    "k = 5": (4.0, (3.0, 3.85)),
    "k = 7": (5.0, (4.2, 4.9)),
}
"""The paper's 235B table: acceptance length, and the cost that its own measured runs have."""
