"""Slipstream's metrics on vLLM's own ``/metrics`` (prometheus_client's default registry).

Everything is read where it is counted when Prometheus asks, so there is one truth. Which metrics
there are says ``metrics_catalogue``.
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

from rollout_server.acceptance_tracker import AcceptanceTracker
from rollout_server.commit_counts import CommitCounts
from rollout_server.content_store import ContentStore
from rollout_server.control import RolloutControl
from rollout_server.metrics_catalogue import CATALOGUE
from rollout_server.step_costs import StepCosts
from rollout_server.weights import DRAFT, POLICY
from slipstream.access import AccessRefusals
from slipstream.limits import RefusedCalls
from slipstream.metric_families import Scrape

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
