"""Slipstream's metrics on vLLM's own ``/metrics`` (prometheus_client's default registry).

Everything is read where it is counted when Prometheus asks, so there is one truth. Which metrics
there are says ``metrics_catalogue``.

Every metric of the rollout server. ``metrics`` fills them; docs/metrics.md is made from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout_server.acceptance import AcceptanceTracker
from rollout_server.content_store import ContentStore
from rollout_server.control import DRAFT, POLICY, CommitCounts, RolloutControl
from rollout_server.step_costs import StepCosts
from slipstream.metrics import (
    Catalogue,
    Group,
    Label,
    Scrape,
    build_info,
    counter,
    gauge,
    histogram,
)
from slipstream.security import REASONS, AccessRefusals
from slipstream.serving import RefusedCalls

DRAFT_VERSION = Label("draft_version", text="the version that drafted")
POSITION = Label("position", text="0-based")
STEP = (
    Label("kind", ("speculative", "plain", "mixed")),
    Label("requests", text="most requests in the step: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on"),
)
COMMIT_KIND = Label("kind", ("draft", "policy", "both", "rollback"))
_NO_COST = "while the cost of either kind of step is unknown for every number of requests"
_ALL = "of all draft versions since the start, those included that have no series any more."

PROCESS = Group(
    "Process",
    (
        build_info(Label("vllm", text="vLLM's version")),
        counter(
            "calls_refused",
            "Calls of the control plane that ended with an error.",
            Label("method", text="of the service"),
            Label("code", text="the gRPC status"),
        ),
        counter(
            "access_refused",
            "Calls of the control plane by those who had no right to them.",
            Label("reason", REASONS),
        ),
    ),
)

ACCEPTANCE = Group(
    "Acceptance",
    (
        counter("drafts", "Verification steps of one request each.", DRAFT_VERSION),
        counter("draft_tokens", "Tokens proposed.", DRAFT_VERSION),
        counter("accepted_tokens", "Proposed tokens accepted.", DRAFT_VERSION),
        counter(
            "accepted_per_position",
            "Proposed tokens accepted at each draft position.",
            DRAFT_VERSION,
            POSITION,
        ),
        counter(
            "generated_tokens",
            "Tokens generated while this draft was live, whether it proposed or not.",
            Label("draft_version", text="the version that was live"),
        ),
        counter("all_drafts", f"`drafts` {_ALL}"),
        counter("all_draft_tokens", f"`draft_tokens` {_ALL}"),
        counter("all_accepted_tokens", f"`accepted_tokens` {_ALL}"),
        counter("all_accepted_per_position", f"`accepted_per_position` {_ALL}", POSITION),
        counter("all_generated_tokens", f"`generated_tokens` {_ALL}"),
    ),
)

COST = Group(
    "What speculation costs",
    (
        counter(
            "engine_steps",
            "Engine steps: `speculative` ones verify drafts, `plain` ones decode a token per "
            "request, `mixed` ones take prompts too, or verify drafts of some requests only.",
            *STEP,
            absent="for kinds and sizes that have not occurred",
        ),
        counter(
            "engine_step_seconds",
            "Time that these steps took, from one step's output to the next while the engine is "
            "busy.",
            *STEP,
            absent="for kinds and sizes that have not occurred",
        ),
        gauge(
            "break_even_acceptance_length",
            "Cost of a recent speculative step in plain steps of as many requests: speculation "
            "pays while the acceptance length is greater.",
            absent=_NO_COST,
        ),
        gauge(
            "speculation_pays",
            "1 while the live draft's acceptance length over the last minute is greater than the "
            "break-even one, else 0.",
            absent=f"{_NO_COST}, or while there were few drafts in the last minute",
        ),
        gauge("speculation_enabled", "1 while drafts are proposed."),
        gauge("draft_length", "Tokens that a draft proposes at most (k)."),
    ),
)

VERSIONS = Group(
    "Versions and staleness",
    (
        gauge("draft_version", "Draft version that proposes."),
        gauge(
            "trained_against_policy_version",
            "Policy version that the live draft was trained against.",
            absent="for a draft that was trained on none",
        ),
        gauge(
            "policy_version",
            "Policy version that verifies.",
            absent="until one was pushed through Slipstream",
        ),
        gauge(
            "draft_staleness_versions",
            "Policy versions that the live draft is behind the policy; a draft that was trained "
            "on none counts as trained on version 0.",
            absent="until a policy was pushed through Slipstream",
        ),
        gauge("draft_live_timestamp_seconds", "Unix time at which the live draft went live."),
        gauge(
            "policy_live_timestamp_seconds",
            "Unix time at which the live policy went live.",
            absent="until one was pushed through Slipstream",
        ),
    ),
)

COMMITS = Group(
    "Commits",
    (
        counter(
            "commits",
            "Commits by what they changed and how they ended.",
            COMMIT_KIND,
            Label("outcome", ("ok", "failed", "untrusted")),
        ),
        histogram(
            "commit_seconds",
            "Seconds from a commit call's arrival to the worker's answer.",
            COMMIT_KIND,
        ),
        histogram(
            "worker_stall_seconds", "Seconds that the engine stood still for a commit.", COMMIT_KIND
        ),
        gauge("staged_bytes", "Bytes of weights held on the host."),
        gauge("staged_capacity_bytes", "Bound of these (`--stage-bytes`)."),
        gauge("stages", "Stages that are held and not live."),
        gauge("ready", "1 while requests may be sent there."),
    ),
)

CATALOGUE = Catalogue(
    "Rollout server",
    "slipstream_rollout_",
    "`/metrics` of the OpenAI API's port, beside vLLM's own (`vllm:*`)",
    (PROCESS, ACCEPTANCE, COST, VERSIONS, COMMITS),
)


OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True)
class RolloutCollector(Collector):
    """One scrape of everything.

    Attributes:
        tracker: acceptance per draft version.
        control: what is live and staged.
        store: weights on the host.
        commits: that were tried.
        costs: of engine steps.
        refused: calls of the control plane.
        access: calls of those who had no right to them.
        draft_length: num_speculative_tokens.
        vllm: its version.
    """

    tracker: AcceptanceTracker
    control: RolloutControl
    store: ContentStore
    commits: CommitCounts
    costs: StepCosts
    refused: RefusedCalls
    access: AccessRefusals
    draft_length: int
    vllm: str

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        scrape = Scrape(CATALOGUE)
        scrape.build(vllm=self.vllm)
        self._acceptance(scrape)
        self._cost(scrape)
        self._versions(scrape)
        self._commits(scrape)
        yield from scrape.families()

    def _acceptance(self, scrape: Scrape) -> None:
        everything = {(str(v),): c for v, c in self.tracker.exposed().items()}
        for prefix, counted in (("", everything), ("all_", {(): self.tracker.all})):
            for labels, counters in counted.items():
                scrape.put(f"{prefix}drafts", counters.drafts, *labels)
                scrape.put(f"{prefix}draft_tokens", counters.draft_tokens, *labels)
                scrape.put(f"{prefix}accepted_tokens", counters.accepted_tokens, *labels)
                scrape.put(f"{prefix}generated_tokens", counters.generated_tokens, *labels)
                accepted = list(counters.accepted_per_position)
                accepted += [0] * (self.draft_length - len(accepted))
                for place, count in enumerate(accepted):
                    scrape.put(f"{prefix}accepted_per_position", count, *labels, str(place))

    def _cost(self, scrape: Scrape) -> None:
        for (kind, requests), total in self.costs.sums.items():
            scrape.put("engine_steps", total.steps, kind, str(requests))
            scrape.put("engine_step_seconds", total.seconds, kind, str(requests))
        scrape.put("break_even_acceptance_length", self.costs.break_even)
        scrape.put("speculation_pays", self.costs.pays(time.monotonic()))
        scrape.put("speculation_enabled", self.control.speculation_enabled)
        scrape.put("draft_length", self.draft_length)

    def _versions(self, scrape: Scrape) -> None:
        draft, policy = self.control.live[DRAFT], self.control.live[POLICY]
        scrape.put("draft_version", draft.version)
        scrape.put("trained_against_policy_version", draft.trained_against)
        scrape.put("policy_version", policy.version)
        if policy.version is not None:
            behind = policy.version - (draft.trained_against or 0)
            scrape.put("draft_staleness_versions", max(0, behind))
        scrape.put("draft_live_timestamp_seconds", self.control.live_since[DRAFT])
        scrape.put("policy_live_timestamp_seconds", self.control.live_since.get(POLICY))

    def _commits(self, scrape: Scrape) -> None:
        for (kind, outcome), count in dict(self.commits.outcomes).items():
            scrape.put("commits", count, kind, outcome)
        for kind, durations in self.commits.seconds.items():
            scrape.observe("commit_seconds", durations, kind)
        for kind, durations in self.commits.stall.items():
            scrape.observe("worker_stall_seconds", durations, kind)
        scrape.put("staged_bytes", self.store.bytes)
        scrape.put("staged_capacity_bytes", self.store.capacity)
        scrape.put("stages", len(self.control.staged))
        for (method, code), count in sorted(self.refused.counts.items()):
            scrape.put("calls_refused", count, method, code)
        scrape.count("access_refused", self.access.counts())
        scrape.put("ready", not self.control.readiness.reason)


def negotiate(app: Any, registry: Any) -> None:
    """Serve ``/metrics`` as OpenMetrics to who asks for it, else as text, ahead of vLLM's route.

    vLLM's own answers with text whatever is asked.

    Args:
        app: vLLM's FastAPI application.
        registry: what is served.
    """

    def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        if OPENMETRICS in accept:
            # Without this prometheus_client 0.26 calls "vllm:..." "vllm_...", and to Prometheus 2,
            # which asks for OpenMetrics, every metric of vLLM had another name than before.
            accept = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), headers={"Content-Type": content_type})

    app.router.routes.insert(0, Route("/metrics", metrics, methods=["GET"]))
