"""Every metric of the bridge. ``prometheus`` fills them; docs/metrics.md is made from them."""

from __future__ import annotations

from slipstream.metric_spec import Catalogue, Group, Label, build_info, counter, gauge

_SYNCED = "before the first sync"

PROCESS = Group(
    "Process",
    (
        build_info(),
        gauge("connected", "1 while a run is open and its stream is up."),
        gauge(
            "transport",
            "1; the label says how the states travel.",
            Label("transport", ("grpc", "shared_memory")),
            absent="before the first stream",
        ),
        gauge("capture_enabled", "1 while the next capture window would take states."),
        counter("connects", "Runs opened, the first included."),
    ),
)

CAPTURE = Group(
    "Capture",
    (
        counter(
            "captures",
            "Capture windows: `taken`; `skipped` because capture was off; `refused` for a call "
            "that could not be served.",
            Label("outcome", ("taken", "skipped", "refused")),
        ),
        counter("captured_tokens", "Unpadded tokens of the forward passes given to `ship`."),
        counter("chosen_samples", "Samples that the selector took of them."),
        counter("chosen_tokens", "Tokens of these."),
        counter("not_chosen_samples", "Samples that it left, for the budget's sake."),
    ),
)

SHIPPING = Group(
    "Shipping",
    (
        counter("sent_samples", "Samples sent, repeats included."),
        counter("sent_bytes", "Bytes of these, through shared memory or serialized."),
        counter("resent_samples", "Repeats after a lost stream."),
        counter(
            "acknowledgements",
            "The trainer's answers.",
            Label("outcome", ("accepted", "duplicate", "refused")),
        ),
        counter(
            "samples_refused",
            "Refused samples, by field.",
            Label("field", text="as in `slipstream_trainer_samples_refused_total`"),
        ),
        counter(
            "shed_samples",
            "Samples given up, by reason.",
            Label(
                "reason",
                (
                    *("closed", "copies_behind", "deadline", "draft_changed", "no_credit"),
                    *("non_finite", "outbox_full", "policy_moved", "policy_not_announced"),
                    *("policy_refused", "shipper_died", "superseded", "too_large"),
                ),
            ),
        ),
        counter("shed_bytes", "Bytes of them."),
        gauge("outbox_samples", "Samples that wait, unacknowledged ones included."),
        gauge("outbox_bytes", "Bytes of these."),
        gauge("outbox_capacity_bytes", "Bound of these."),
        gauge(
            "ring_used_bytes",
            "Bytes of the ring that hold unacknowledged samples.",
            absent="while the states do not go through shared memory",
        ),
        gauge(
            "ring_capacity_bytes",
            "Size of the ring.",
            absent="while the states do not go through shared memory",
        ),
    ),
)

SYNC = Group(
    "Weight syncs",
    (
        gauge("policy_version", "Last policy version whose sync ended well.", absent=_SYNCED),
        counter("announced_policies", "Policy versions that the trainer was told of."),
        counter("syncs", "Sync windows that ended well."),
        gauge(
            "last_sync_seconds",
            "What the last sync took: staging the draft, staging the policy, committing.",
            Label("phase", ("prepare", "stage", "commit")),
            absent=_SYNCED,
        ),
        gauge(
            "last_sync_draft_errors",
            "Reasons for which the draft could not follow the policy in the last sync.",
            absent=_SYNCED,
        ),
    ),
)

CATALOGUE = Catalogue(
    "Policy bridge",
    "slipstream_bridge_",
    "the training process, where it registers `policy_bridge.prometheus.BridgeCollector`; "
    "`bridge.stats()` has the same figures",
    (PROCESS, CAPTURE, SHIPPING, SYNC),
)
