"""``draft-trainer plan``: whether speculation and adaptation pay, before a GPU is rented."""

from __future__ import annotations

import dataclasses
import http.client
import json
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from draft_trainer.cli.trainer import File, at_least, print_table
from slipstream.errors import RefusedError
from slipstream.hub import read_json

if TYPE_CHECKING:
    from slipstream.economics.costs import Costs, StepTable

LEAST_STEPS = 4
"""The steps of a kind and size below which a server's cost is not known: fewer than one with
``--speculation auto`` takes of each before it is ready."""

_LABELS = ("kind", "requests", "draft_length", "position")

Number = Annotated[int, arg(metavar="N")]
Seconds = Annotated[float, arg(metavar="S")]
Rates = Annotated[str | None, arg(metavar="R,R,R", help_behavior_hint="(optional)")]
Server = Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="(optional)")]
Gpu = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(optional)")]

_AT_LEAST_ONE = ("engines", "gpus_per_engine", "rollouts", "requests", "steps")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say whether speculation pays, at which draft length, and whether adapting the draft does.

    Step costs come from a measured table (--step-costs), from a rollout server that has measured
    its own (--server), or from an estimate of hardware and model (--gpu and --policy). Prints two
    tables and a verdict; runs in seconds, without a GPU. vLLM's log divides accepted tokens by all
    drafts: take --acceptance from it with a fixed draft length only.
    """

    lengths: Annotated[str, arg(metavar="FILE")]
    """Completion lengths of a step: a file of lines, or lognormal:MEDIAN,SIGMA,CAP."""
    acceptance: Rates = None
    """Accepted tokens / drafts with a token there, by position (default: of --server)."""
    frozen_acceptance: Rates = None
    """The same for a draft that is not adapted."""
    server: Server = None
    """HTTP address, or https://HOST:PORT, of a rollout server whose measurements to use."""
    step_costs: File = None
    """CSV with the columns batch_size, num_draft_tokens and step_seconds."""
    step_noise: Annotated[float, arg(metavar="X")] = 0.05
    """Share by which a larger step in --step-costs may be cheaper than a smaller one."""
    policy: File = None
    """The policy's config.json, or its folder, for an estimate."""
    gpu: Gpu = None
    """Hardware of an engine, for an estimate: A100, H20, H100, H200, B200 or GB200."""
    gpus_per_engine: Number = 1
    """Tensor-parallel size of an engine."""
    weight_bytes: Annotated[float, arg(metavar="X")] = 2.0
    """Bytes of a policy weight: 2 for bfloat16, 1 for FP8."""
    draft_vocabulary: Number = 32_000
    """Tokens that the EAGLE-3 draft can propose."""
    engines: Number = 1
    """Rollout engines."""
    rollouts: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    """Completions per step on each engine; by default the value of --requests."""
    requests: Number = 64
    """Requests that an engine runs at once."""
    prompt_tokens: Number = 0
    """Prompt tokens of a request."""
    other_seconds: Seconds = 0.0
    """Seconds of a step outside generation: log-probs, update, weight sync."""
    lag: Number = 0
    """Policy versions that rollouts may be behind; 0: generation and training alternate."""
    capture_seconds: Seconds = 0.0
    """Seconds per step that capture adds to the policy's step."""
    training_seconds: Seconds = 0.0
    """Seconds per step that the draft trainer takes."""
    training_share: Annotated[float, arg(metavar="X")] = 1.0
    """Fraction of trainer time that slows the loop: 1 if they take turns on a device."""
    publish_seconds: Seconds = 0.0
    """Seconds per step that generation pauses for a new draft."""
    equal_lengths: bool = False
    """Accept --lengths whose maximum is close to their median."""
    steps: Number = 10
    """RL steps to simulate."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Seed of the simulation."""
    json: File = None
    """Write the plan here, with every input."""
    page: File = None
    """Write an HTML page with plots here."""

    def run(self) -> int:
        """Prints the plan."""
        from draft_trainer.planning import Fleet, make_plan, read_lengths, tables, write_page
        from slipstream.economics.arithmetic import Loop

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = 1 if field.name in _AT_LEAST_ONE else 0
                at_least(f"--{field.name.replace('_', '-')}", value, least)
        costs, source, counted, guess = self._costs()
        rates = _rates("--acceptance", self.acceptance) or counted
        if rates is None:
            raise RefusedError(
                "--acceptance",
                "nothing",
                "acceptance by position",
                "give it as in 0.8,0.6,0.45 (draft-trainer status shows it), or give --server",
            )
        fleet = Fleet(
            costs=costs,
            costs_source=source,
            guess=guess,
            rates=rates,
            frozen_rates=_rates("--frozen-acceptance", self.frozen_acceptance),
            lengths=read_lengths(self.lengths, self.equal_lengths),
            loop=Loop(self.other_seconds, self.lag),
            upkeep=self.capture_seconds
            + self.publish_seconds
            + self.training_seconds * self.training_share,
            engines=self.engines,
            rollouts=self.rollouts or self.requests,
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            steps=self.steps,
            seed=self.seed,
        )
        plan = make_plan(fleet)
        for title, columns, rows in tables(plan):
            print(title)
            print_table([[c or "arm " for c in columns], *rows])
            print()
        print(f"Step costs: {source}.")
        print(plan["verdict"])
        if self.json:
            self.json.write_text(json.dumps(plan, indent=2) + "\n")
        if self.page:
            write_page(plan, self.page)
        return 0

    def _costs(self) -> tuple[Costs, str, tuple[float, ...] | None, list[str]]:
        """Step costs, where they come from, acceptance by position where that is counted, and why
        they are a guess."""
        from slipstream.economics.costs import (
            Roofline,
            StepTable,
            beyond_fit,
            eagle3_shape,
            hardware,
            policy_shape,
        )
        from slipstream.serving.identity import is_loopback

        given = [n for n in ("server", "step_costs", "gpu") if getattr(self, n) is not None]
        if len(given) != 1:
            raise RefusedError(
                "step costs",
                " and ".join(f"--{n.replace('_', '-')}" for n in given) or "none given",
                "one of --server, --step-costs, and --gpu with --policy",
                "measured costs are best: --server or --step-costs",
            )
        if self.step_costs is not None:
            table = StepTable.read(self.step_costs, self.step_noise)
            return table, f"{self.step_costs}", None, []
        if self.server is not None:
            scheme = "" if self.server.startswith(("http://", "https://")) else "http://"
            url = f"{scheme}{self.server.rstrip('/')}/metrics"
            try:
                # A proxy that the environment names cannot reach this machine's own addresses.
                local = is_loopback(urllib.parse.urlsplit(url).hostname or "")
                proxies = urllib.request.ProxyHandler({} if local else None)
                with urllib.request.build_opener(proxies).open(url, timeout=30) as answer:
                    table, rates = served_costs(answer.read(8 << 20).decode())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise RefusedError(
                    "--server",
                    f"{url}: {error}",
                    "a rollout server's HTTP address",
                    "check host and port: the OpenAI API's port, not --control-port",
                ) from error
            return table, f"measured by {self.server}", rates, []
        if self.policy is None:
            raise RefusedError("--policy", "nothing", "the policy's config.json", "give it")
        path = self.policy / "config.json" if self.policy.is_dir() else self.policy
        config = read_json(path, "name the policy's config.json as --policy")
        gpu = hardware(str(self.gpu))
        gpus = self.gpus_per_engine
        policy = policy_shape(config, gpus, self.weight_bytes)
        roofline = Roofline(gpu, policy, eagle3_shape(config, self.draft_vocabulary, gpus))
        guess = beyond_fit(gpu, policy, gpus, self.weight_bytes, self.requests)
        return roofline, f"estimated for {gpus} x {gpu.name}, not measured", None, guess


def _rates(option: str, text: str | None) -> tuple[float, ...] | None:
    from slipstream.economics.arithmetic import check_rates

    if text is None:
        return None
    try:
        return check_rates([float(part) for part in text.split(",")])
    except ValueError as error:
        raise RefusedError(option, text, "numbers as in 0.8,0.6", "separate by commas") from error


def served_costs(exposition: str) -> tuple[StepTable, tuple[float, ...]]:
    """Step costs and acceptance by position that a rollout server has measured.

    Args:
        exposition: the text of its ``/metrics``.

    Raises:
        RefusedError: the server has not generated with and without drafts yet.
    """
    from prometheus_client.parser import text_string_to_metric_families

    from slipstream.economics.costs import OFF, StepTable

    name = "slipstream_rollout_"
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith(name):
                key = tuple(sample.labels.get(n, "") for n in _LABELS)
                values.setdefault(sample.name.removeprefix(name), {})[key] = sample.value
    steps, seconds, accepted = (
        values.get(n, {})
        for n in ("engine_steps_total", "engine_step_seconds_total", "acceptance_per_position")
    )
    measured: list[tuple[float, int, float, float]] = []
    for (kind, requests, length, _), count in steps.items():
        if count >= LEAST_STEPS and kind != "mixed":
            total = seconds[kind, requests, length, ""]
            k = OFF if kind == "plain" else int(length)
            measured.append((float(requests), k, total / count, count))
    lengths = {k for _, k, _, _ in measured}
    if not accepted or OFF not in lengths or max(lengths) < 1:
        raise RefusedError(
            "--server",
            f"acceptance at {len(accepted)} positions, "
            f"{'plain steps' if OFF in lengths else 'no plain steps'}, "
            f"steps of draft lengths {sorted(lengths - {OFF})}",
            "a server that has generated with drafts and timed plain steps",
            "serve with --speculation auto or --time-plain-steps, or give --step-costs",
        )
    rates = tuple(accepted["", "", "", str(place)] for place in range(len(accepted)))
    return StepTable.measured(measured), rates
