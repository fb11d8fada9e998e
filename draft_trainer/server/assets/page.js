// Asks the trainer, and shows its answers. Text from outside goes in by textContent.
"use strict";
const DASH = "–";
const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
// protobuf's JSON: 64-bit numbers are strings, an optional field that is not set is absent.
const number = (value) => (value === undefined || value === null ? null : Number(value));
const whole = (value) => (number(value) === null ? DASH : Number(value).toLocaleString("en"));
const fixed = (value, digits) => (value === null ? DASH : value.toFixed(digits));
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// What drafts did in the last minute; nothing, where there were none.
const lengthOf = (drafted) => (drafted ? number(drafted.acceptance_length) : null);
const sharesOf = (drafted) => (drafted ? drafted.acceptance_per_position : []);
const KINDS = { SEVERITY_OK: "good", SEVERITY_WAITING: "warn", SEVERITY_PROBLEM: "bad" };

function showStatus(status) {
  document.title = `draft-trainer${status.run_id ? " · " + status.run_id : ""}`;
  say("run", status.run_id || DASH);
  say("up", ago(status.time - status.started_at));
  say("version", status.code_version);
  const drafts = status.drafted ? Number(status.drafted.drafts) : 0;
  say("length", fixed(lengthOf(status.drafted), 3));
  at("length").className = drafts ? "big good" : "big dim";
  say("length-note", drafts ? `last minute, ${(drafts / 60).toFixed(0)} drafts/s` : "no drafts in the last minute");
  at("positions").replaceChildren(...positions(sharesOf(status.drafted)));
  const speedUp = number(status.speed_up);
  say("speed-up", speedUp === null ? DASH : `${speedUp.toFixed(2)}×`);
  at("speed-up").className = `big ${speedUp === null ? "dim" : speedUp > 1 ? "good" : "bad"}`;
  say("speed-up-note", status.speed_up_note);
  say("draft", whole(status.served_release));
  const undecided = status.trial && status.trial.undecided;
  const trial = status.trial
    ? `, ${status.trial.draft_version} ${undecided ? "undecided" : "on trial"}` : "";
  const waiting = status.served_release !== status.promoted_release
    ? `, ${whole(status.promoted_release)} promoted, not served yet` : "";
  say("draft-note", `newest ${whole(status.newest_release)}${waiting}${status.pinned ? ", pinned by hand" : ""}${trial}`);
  say("policy", whole(status.policy_version));
  const stale = number(status.served_staleness);
  say("staleness", stale === null ? "no policy version yet" : `served draft is ${stale} version${stale === 1 ? "" : "s"} behind`);
  const ready = status.servers.filter((server) => server.severity !== "SEVERITY_PROBLEM").length;
  say("ready", status.servers.length ? `${ready} / ${status.servers.length}` : DASH);
  at("ready").className = ready === status.servers.length ? "big" : "big bad";
  say("ready-note", status.servers.length ? "rollout servers" : "no rollout servers");
  say("samples", whole(status.samples_accepted));
  const fill = (100 * Number(status.replay_bytes)) / Math.max(1, Number(status.replay_capacity_bytes));
  say("samples-note", `${whole(status.samples_refused)} refused, ${whole(status.samples_pending)} pending, buffer ${fill.toFixed(0)} %`);
  say("loss", fixed(number(status.loss), 3));
  const paused = status.training_paused ? "paused" : "";
  say("loss-note", `loss, ${whole(status.train_steps)} steps, ${paused || (status.idle ? "idle" : "training")}`);
  say("decision", (paused && `${paused}: `) + (status.training_decision || "no policy version yet"));
  const last = status.last_verdict;
  say("verdict", last ? `${ago(status.time - last.judged_at)} ago, ${last.outcome.replaceAll("_", " ")}: ${last.reason}`
    : "no candidate was judged yet");
  const spans = last && last.gate ? last.gate.by_position : [];
  say("spans", spans.map((span) => `from position ${span.first_position}: ${fixed(span.candidate_acceptance_length, 2)}`
    + ` against ${fixed(span.incumbent_acceptance_length, 2)}`).join(", "));
  const problems = status.diagnosis.filter((one) => one.severity === "SEVERITY_PROBLEM");
  at("trouble").hidden = !problems.length;
  say("trouble", problems.map((one) => `${one.part}: ${one.found}. ${one.next_step}`).join("\n"));
  at("fleet").tBodies[0].replaceChildren(...status.servers.map(serverRow));
}

function positions(shares) {
  if (!shares.length) return [element("span", "dim", DASH)];
  return shares.map((share, place) => {
    const row = element("div", "position"), bar = element("progress");
    bar.max = 1;
    bar.value = share;
    row.append(element("span", "dim", String(place + 1)), bar, element("span", "", share.toFixed(2)));
    return row;
  });
}

function serverRow(server) {
  const state = server.state || {}, row = element("tr"), kind = KINDS[server.severity];
  row.append(
    element("td", "", server.address),
    element("td", kind, server.standing),
    element("td", "n", whole(state.draft_version)),
    element("td", "n", whole(state.trained_against_policy_version)),
    element("td", "n", whole(state.policy_version)),
    element("td", "n", fixed(lengthOf(server.last_minute), 3)),
    element("td", "", sharesOf(server.last_minute).map((share) => share.toFixed(2)).join("  ") || DASH),
    element("td", kind, server.error || server.not_ready || ""),
  );
  return row;
}

function showEvents(list) {
  const rows = list.events.slice().reverse().map((event) => {
    const kind = event.kind;
    const bad = /stage_failed|training_failed|rolled_back|not_committed|unreachable|not_ready|not_written/.test(kind);
    const good = /committed|passed|promoted|healed|server_ready|server_back/.test(kind);
    const row = element("tr");
    row.append(
      element("td", "dim", clock(event.time)),
      element("td", bad ? "bad" : good ? "good" : "", kind.replaceAll("_", " ")),
      element("td", "n", whole(event.draft_version)),
      element("td", "n", whole(event.policy_version)),
      element("td", "", event.server),
      element("td", "dim", event.reason),
    );
    return row;
  });
  at("events").tBodies[0].replaceChildren(...rows);
}

// Plots. A series is [label, colour, scale, further options of uPlot's].
const plots = {};
function plot(id, data, series, time, right) {
  const place = at(id), size = { width: place.clientWidth, height: place.clientHeight - 34 };
  if (plots[id]) {
    plots[id].setData(data);
    return;
  }
  const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  plots[id] = new uPlot({
    ...size,
    scales: { x: { time } },
    axes: [
      { ...axis, ...(time ? { values: (_, splits) => splits.map(clock) } : { incrs: [1, 2, 5, 10, 20, 50, 100] }) },
      { ...axis, scale: "y" },
      ...(right ? [{ ...axis, scale: right, side: 1, grid: { show: false } }] : []),
    ],
    series: [{
      label: time ? "at" : "result",
      value: (_, value) => (value === null ? DASH : time ? clock(value) : value),
    }, ...series.map(([label, name, scale, more]) => ({
      label, scale, stroke: colour(name), width: 2, spanGaps: false, ...more,
    }))],
  }, data, place);
}

addEventListener("resize", () => {
  for (const [id, made] of Object.entries(plots)) {
    made.setSize({ width: at(id).clientWidth, height: at(id).clientHeight - 34 });
  }
});

function showSnapshots(snapshots) {
  const time = snapshots.map((s) => s.time);
  const stepped = { paths: uPlot.paths.stepped({ align: 1 }), width: 1, points: { show: false } };
  const three = { value: (_, value) => (value === null ? DASH : value.toFixed(3)) };
  plot("acceptance", [
    time,
    snapshots.map((s) => lengthOf(s.drafted)),
    snapshots.map((s) => number(s.served_release)),
    snapshots.map((s) => number(s.policy_version)),
  ], [
    ["acceptance length", "good", "y", three],
    ["draft", "draft", "version", stepped],
    ["policy", "accent", "version", { ...stepped, dash: [4, 3] }],
  ], true, "version");
  plot("training", [
    time,
    snapshots.map((s) => number(s.loss)),
    snapshots.map((s, index) => {
      const before = snapshots[index - 1];
      const count = before ? Number(s.samples_accepted) - Number(before.samples_accepted) : -1;
      // A restarted trainer counts from 0 again.
      return count < 0 || s.time <= before.time ? null : count / (s.time - before.time);
    }),
  ], [
    ["loss", "accent", "y", three],
    ["samples/s", "dim", "rate", { width: 1, points: { show: false } }],
  ], true, "rate");
}

function showGate(verdicts) {
  const measured = verdicts.filter((verdict) => verdict.gate);
  const gains = (outcome) => measured.map((v) => ((v.outcome === "passed") === outcome ? v.gate.difference : null));
  const dots = (size) => ({ paths: () => null, points: { show: true, size } });
  plot("gate", [
    measured.map((_, index) => index + 1),
    gains(true),
    gains(false),
    measured.map((v) => v.gate.difference - v.gate.difference_half_width),
  ], [
    ["passed", "good", "y", dots(9)],
    ["dropped", "dim", "y", dots(7)],
    ["interval from", "accent", "y", { width: 1, points: { show: false } }],
  ], false);
}

let snapshots = [];
async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function refreshHistory() {
  const history = await ask("api/history");
  snapshots = history.snapshots;
  showGate(history.verdicts);
}

let asked = 0;
async function refresh() {
  try {
    if (asked % 30 === 0) await refreshHistory();
    asked += 1;
    const [status, events] = await Promise.all([ask("api/status"), ask("api/events")]);
    if (!snapshots.length || status.time > snapshots[snapshots.length - 1].time) snapshots.push(status);
    showStatus(status);
    showEvents(events);
    showSnapshots(snapshots);
    say("alive", "live");
    at("alive").className = "good";
  } catch (error) {
    say("alive", `no answer: ${error.message}`);
    at("alive").className = "bad";
    asked = 0;
  }
}

async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, 2000);
}
addEventListener("DOMContentLoaded", loop);
