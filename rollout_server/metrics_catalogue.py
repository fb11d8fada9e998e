"""Every metric of the rollout server. ``metrics`` fills them; docs/metrics.md is made from them."""

from __future__ import annotations

from slipstream.access import REASONS
from slipstream.metric_spec import Catalogue, Group, Label, build_info, counter, gauge, histogram

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
