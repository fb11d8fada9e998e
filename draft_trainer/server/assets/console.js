// Asks the trainer, and shows what it says. Whatever came from outside goes in by textContent.
"use strict";

const DASH = "–", COLOURS = 8;
const MILLISECONDS = { status: 2000, history: 5000, events: 2000 };
const facts = { status: null, history: null, events: null };
const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
// protobuf's JSON: 64-bit numbers are strings, an optional field that is not set is absent.
const number = (value) => (value === undefined || value === null ? null : Number(value));
const whole = (value) => (number(value) === null ? DASH : Number(value).toLocaleString("en"));
const fixed = (value, digits) => (value === null ? DASH : value.toFixed(digits));
const sum = (values) => (values || []).reduce((total, value) => total + Number(value), 0);
const pairs = (list) => list.slice(1).map((after, index) => [list[index], after]);
const lengthOf = (drafts, accepted) => (drafts > 0 ? 1 + accepted / drafts : null);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

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

function shares(drafted) {
  if (!drafted || !(Number(drafted.drafts) > 0)) return [];
  return (drafted.accepted_per_position || []).map((count) => Number(count) / Number(drafted.drafts));
}

function together(drafted) {
  const all = { drafts: 0, accepted_per_position: [] };
  for (const one of drafted) {
    all.drafts += Number(one.drafts);
    one.accepted_per_position.forEach((count, place) => {
      all.accepted_per_position[place] = (all.accepted_per_position[place] || 0) + Number(count);
    });
  }
  return all;
}

function stateOf(server) {
  if (!server.reachable) return ["unreachable", "bad"];
  if (server.state && server.state.not_ready) return ["not ready", "bad"];
  return server.state.speculation_enabled ? ["ready", "good"] : ["not drafting", "warn"];
}

function showStatus(status) {
  document.title = `draft-trainer${status.run_id ? " · " + status.run_id : ""}`;
  say("run", status.run_id || DASH);
  say("up", ago(Date.now() / 1000 - status.started_at));
  say("version", status.code_version);
  const all = together(status.last_minute);
  say("length", fixed(lengthOf(all.drafts, sum(all.accepted_per_position)), 3));
  at("length").className = all.drafts ? "big good" : "big dim";
  say("length-note", all.drafts ? `last minute, ${(all.drafts / 60).toFixed(0)} drafts/s` : "no drafts in the last minute");
  at("positions").replaceChildren(...positions(shares(all)));
  say("draft", whole(status.promoted_release));
  const trial = status.trial ? `, ${status.trial.draft_version} on trial` : "";
  say("draft-note", `${status.pinned ? "pinned by hand" : "promoted"}, newest ${whole(status.newest_release)}${trial}`);
  say("policy", whole(status.policy_version));
  const stale = number(status.staleness);
  say("staleness", stale === null ? "no policy version yet" : `draft is ${stale} version${stale === 1 ? "" : "s"} behind`);
  const ready = status.servers.filter((server) => stateOf(server)[0] === "ready").length;
  say("ready", status.servers.length ? `${ready} / ${status.servers.length}` : DASH);
  at("ready").className = ready === status.servers.length ? "big" : "big bad";
  say("ready-note", status.servers.length ? "rollout servers" : "no rollout servers");
  say("samples", whole(status.samples_accepted));
  const fill = (100 * Number(status.replay_bytes)) / Math.max(1, Number(status.replay_capacity_bytes));
  say("samples-note", `${whole(status.samples_refused)} refused, ${whole(status.samples_pending)} pending, buffer ${fill.toFixed(0)} %`);
  say("loss", fixed(number(status.loss), 3));
  say("loss-note", `loss, ${whole(status.train_steps)} steps, ${status.idle ? "idle" : "training"}`);
  const trouble = status.training_error;
  at("trouble").hidden = !trouble;
  say("trouble", trouble || "");
}

function positions(values) {
  if (!values.length) return [element("span", "dim", DASH)];
  return values.map((value, place) => {
    const row = element("div", "position");
    const bar = element("progress");
    bar.max = 1;
    bar.value = value;
    row.append(element("span", "dim", String(place + 1)), bar, element("span", "", value.toFixed(2)));
    return row;
  });
}

function showFleet(status, history) {
  const pasts = new Map(history.servers.map((past) => [past.address, past]));
  const rows = status.servers.map((server) => {
    const [text, kind] = stateOf(server);
    const state = server.state || {};
    const row = element("tr");
    const drafted = server.last_minute;
    row.append(
      element("td", "", server.address),
      element("td", kind, text),
      element("td", "n", whole(state.draft_version)),
      element("td", "n", whole(state.trained_against_policy_version)),
      element("td", "n", whole(state.policy_version)),
      element("td", "n", fixed(number(drafted && drafted.acceptance_length), 3)),
      element("td", "", shares(drafted).map((share) => share.toFixed(2)).join("  ") || DASH),
    );
    const last = element("td", kind, server.error || state.not_ready || undefined);
    if (!last.textContent) last.append(sparkline(slots(pasts.get(server.address), history.slot_s), 180, 22));
    row.append(last);
    return row;
  });
  at("fleet").tBodies[0].replaceChildren(...rows);
}

function slots(past, seconds) {
  if (!past || !past.slots.length) return [];
  const newest = Math.round(past.slots[past.slots.length - 1].time / seconds);
  const values = new Array(60).fill(null);
  for (const slot of past.slots) {
    const index = 59 - (newest - Math.round(slot.time / seconds));
    if (index >= 0) values[index] = lengthOf(Number(slot.drafts), sum(slot.accepted_per_position));
  }
  return values;
}

function showAcceptance(history) {
  const releases = new Map();
  for (const cell of history.acceptance) {
    const first = number(cell.first_policy_version), last = number(cell.last_policy_version);
    if (first === null) continue;
    const y = lengthOf(Number(cell.drafts), sum(cell.accepted_per_position));
    const range = first === last ? `policy ${first}` : `policies ${first} to ${last}`;
    const by = shares(cell).map((share) => share.toFixed(2)).join(" ");
    const text = `draft ${cell.draft_version}, ${range}: ${fixed(y, 3)} (${by}) over ${whole(cell.drafts)} drafts`;
    const version = Number(cell.draft_version);
    if (!releases.has(version)) releases.set(version, []);
    releases.get(version).push({ x: (first + last) / 2, y, text });
  }
  const series = [...releases].map(([version, points]) => ({
    kind: `c${version % COLOURS}`, mark: String(version), line: true, dots: 3, points,
  }));
  plot(at("acceptance"), {
    series, xText: (x) => String(x), xWhole: true, readout: at("acceptance-at"),
    empty: "no drafts at a known policy version yet",
  });
  const shown = [...releases.keys()].slice(-COLOURS);
  at("acceptance-legend").replaceChildren(...shown.map((version) => {
    const item = element("span", `c${version % COLOURS}`);
    item.append(element("i", "dot"), `draft ${version}`);
    return item;
  }), element("span", "", "x: policy version"));
}

function showGate(history) {
  const judged = history.verdicts.filter((verdict) => verdict.gate);
  const points = (outcome) => judged.map((verdict, index) => [verdict, index + 1])
    .filter(([verdict]) => (verdict.outcome === "passed") === outcome)
    .map(([verdict, x]) => ({
      x, y: verdict.gate.difference, below: verdict.gate.difference_half_width,
      text: `${clock(verdict.judged_at)} ${verdict.reason}`,
    }));
  plot(at("gate"), {
    series: [{ kind: "failed", dots: 3.5, points: points(false) }, { kind: "passed", dots: 4, points: points(true) }],
    xText: (x) => String(x), xWhole: true, zero: true, readout: at("gate-at"), empty: "no verdict yet",
  });
}

function showLosses(history) {
  const moments = history.whole;
  const points = pairs(moments).map(([a, b]) => {
    const steps = Number(b.train_steps) - Number(a.train_steps);
    const y = steps > 0 ? (b.loss_total - a.loss_total) / steps : null;
    return { x: Number(b.train_steps), y, text: `step ${b.train_steps}: ${fixed(y, 4)}` };
  }).filter((point) => point.y !== null);
  plot(at("losses"), {
    series: [{ kind: "accent", line: true, points }],
    xText: (x) => x.toLocaleString("en"), xWhole: true, readout: at("losses-at"), empty: "no training step yet",
  });
  const [before, now] = history.recent.slice(-2);
  if (now) {
    const seconds = now.time - before.time;
    const rate = (Number(now.samples_accepted) - Number(before.samples_accepted)) / seconds;
    at("samples").title = `${rate.toFixed(1)} per second`;
  }
}

function showEvents(list) {
  const rows = list.events.slice().reverse().map((event) => {
    const kind = event.kind.replace("EVENT_KIND_", "").toLowerCase();
    const bad = /stage_failed|training_failed|rolled_back|not_committed|unreachable|not_ready|not_written/.test(kind);
    const good = /committed|passed|promoted|healed|server_ready|server_back/.test(kind);
    const row = element("tr");
    row.append(
      element("td", "dim", clock(event.time)),
      element("td", bad ? "bad" : good ? "good" : "", kind.replaceAll("_", " ")),
      element("td", "n", whole(event.draft_version)),
      element("td", "n", whole(event.policy_version)),
      element("td", "", event.server || ""),
      element("td", "dim", event.reason),
    );
    return row;
  });
  at("events").tBodies[0].replaceChildren(...rows);
}

const etags = {};
let answeredAt = Date.now();

async function ask(name) {
  const headers = etags[name] ? { "If-None-Match": etags[name] } : {};
  const answer = await fetch(`api/${name}`, { headers, cache: "no-store", signal: AbortSignal.timeout(8000) });
  if (answer.status !== 304) {
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    facts[name] = await answer.json();
    etags[name] = answer.headers.get("ETag");
    show(name);
  }
  answeredAt = Date.now();
}

function show(name) {
  if (name === "events") showEvents(facts.events);
  if (name === "status") showStatus(facts.status);
  if (name === "history") { showAcceptance(facts.history); showGate(facts.history); showLosses(facts.history); }
  if (facts.status && facts.history && name !== "events") showFleet(facts.status, facts.history);
  if (facts.status && facts.history && facts.events) document.body.dataset.complete = "yes";
}

// One question of each kind at a time, none while nobody looks.
async function follow(name) {
  for (;;) {
    if (!document.hidden) {
      try {
        await ask(name);
        say("alive", "live");
        at("alive").className = "good";
      } catch (error) {
        say("alive", `no answer for ${ago((Date.now() - answeredAt) / 1000)}`);
        at("alive").className = "bad";
      }
    }
    await new Promise((wake) => setTimeout(wake, MILLISECONDS[name]));
  }
}

for (const name of Object.keys(MILLISECONDS)) follow(name);
