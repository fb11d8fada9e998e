"""The fleet as lines of text: one server a line, those in trouble first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from draft_trainer.cli.past import DASH, number, per_position, share
from draft_trainer.cli.trainer import plain
from slipstream.v1 import console_pb2
from slipstream.v1 import draft_trainer_pb2 as pb

FEWEST = 2


def heading(name: str, note: str, width: int) -> Text:
    """A rule with a name, and a note at its right end where it fits."""
    tail = f" {note} ──" if note and len(note) + len(name) + 16 <= width else ""
    rule = "─" * (width - len(name) - len(tail) - 4)
    return Text.assemble(("── ", "dim"), (name, "bold cyan"), (f" {rule}{tail}", "dim"))


def fleet_lines(
    status: pb.TrainerStatus,
    width: int,
    height: int | None,
) -> list[Text]:
    """Heading, column heads, servers; in ``height`` lines (at least four) those that fit.

    Args:
        status: with the servers.
        width: columns.
        height: lines; None for as many as there are servers.
    """
    servers = sorted(status.servers, key=lambda s: (state_of(s) == "ready", s.address))
    ready = sum(state_of(server) == "ready" for server in servers)
    note = f"{ready} of {len(servers)} ready" if servers else ""
    lines = [heading("fleet", note, width)]
    if not servers:
        return [*lines, Text(" no rollout servers (publish.rollout_servers)", style="dim")]
    room = len(servers) if height is None else max(FEWEST, height - 2)
    shown: Sequence[console_pb2.ServerView] = servers
    if len(servers) > room:
        shown = servers[: room - 1]
    name = min(30, max(len("server"), *(len(s.address) for s in shown)))
    head = f" {'server':{name}}  {'state':11} {'draft':>5} {'policy':>6} {'length':>7}  by position"
    lines.append(Text(head, style="dim"))
    lines += [_server(server, name) for server in shown]
    if len(servers) > len(shown):
        lines.append(Text(f" and {len(servers) - len(shown)} more, all shown by --once"))
    return lines


def state_of(server: console_pb2.ServerView) -> str:
    """``ready``, or what is wrong in a word or two."""
    if not server.reachable:
        return "unreachable"
    if server.state.not_ready:
        return "not ready"
    return "ready" if server.state.speculation_enabled else "not drafting"


def _server(server: console_pb2.ServerView, name: int) -> Text:
    state, drafted = server.state, server.last_minute
    known = server.HasField("state")
    what = state_of(server)
    style = {"ready": "green", "not drafting": "yellow"}.get(what, "bold red")
    line = Text(f" {plain(server.address)[:name]:{name}}  ")
    line.append(f"{what:12}", style=style)
    line.append(f"{state.draft_version if known else DASH:>5} ")
    policy = known and state.HasField("policy_version")
    line.append(f"{state.policy_version if policy else DASH:>6} ")
    has = drafted.HasField("acceptance_length")
    line.append(f"{number(drafted.acceptance_length if has else None):>7}  ", style="bold")
    shares = per_position(drafted.drafts, drafted.accepted_per_position)
    line.append(" ".join(share(value) for value in shares) or DASH)
    trouble = server.error or state.not_ready
    if trouble:
        line.append(f"  {plain(trouble)}", style="red")
    return line
