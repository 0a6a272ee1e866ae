// Asks /status once a second while it is looked at, and shows the answer. What comes from the
// server is only ever written as text.

const KEY = "specrollout-key";
const HISTORY = "specrollout-history";
const EVERY_MS = 1000;
const KEPT_SECONDS = 300;
const GAP_SECONDS = 5; // nothing is drawn between answers that are further apart
const RATE_SECONDS = 5; // the tokens/s of the tile are those of so long
const ACCEPT_SECONDS = 30;
const STALE_SECONDS = 4;
const TIMEOUT_MS = 30_000;
const FEWEST_EXPECTED = 10; // draft tokens: the ratio to fewer says nothing

const byId = (id) => document.getElementById(id);
const whole = (value) => value.toLocaleString("en");
const decimal = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
const ratio = (a, b) => (b > 0 ? a / b : NaN);

let samples = []; // of earlier answers, oldest first
let answeredAt = 0; // by performance.now()
let wake = () => {}; // ends the wait for the next poll

function sampleOf(body) {
  const counts = ({ total, running, waiting }) =>
    ({ generated: total.generated_tokens, forwards: total.target_forwards, running, waiting });
  const replicas = Object.entries(body.engine.replicas).map(([name, engine]) => [name, counts(engine)]);
  return { time: body.uptime - body.age, ...counts(body.engine), replicas: Object.fromEntries(replicas) };
}

// The history that this tab left when it was reloaded, if this server's life goes on with it.
function recall(sample) {
  const left = JSON.parse(sessionStorage.getItem(HISTORY) ?? "null");
  sessionStorage.removeItem(HISTORY);
  if (!left?.samples.length) return;
  const passed = (Date.now() - left.at) / 1000;
  const last = left.samples.at(-1);
  const goesOn = Math.abs(last.time + passed - sample.time) < GAP_SECONDS + STALE_SECONDS;
  if (goesOn && left.model === byId("model").textContent) samples = left.samples;
}

function remember(sample) {
  if (!samples.length) recall(sample);
  const last = samples.at(-1);
  const beganAnew = last && (sample.time < last.time - 1 || sample.generated < last.generated);
  if (beganAnew) samples = [];
  else if (last && sample.time - last.time < 0.1) return; // the same answer again
  samples = samples.filter(({ time }) => time > sample.time - KEPT_SECONDS);
  samples.push(sample);
}

// What was counted over the last so many seconds, from the first sample of them to the last one.
function lately(seconds, counts = (sample) => sample) {
  const last = samples.at(-1);
  const first = samples.find(({ time }) => time >= last.time - seconds - 0.5);
  const [a, b] = [counts(first), counts(last)];
  if (!a || !b) return { seconds: 0, generated: 0, forwards: 0 };
  return {
    seconds: last.time - first.time,
    generated: b.generated - a.generated,
    forwards: b.forwards - a.forwards,
  };
}

function tokensPerSecond(counts) {
  const recent = lately(RATE_SECONDS, counts);
  return ratio(recent.generated, recent.seconds);
}

function acceptLength(total, counts) {
  const recent = lately(ACCEPT_SECONDS, counts);
  return recent.forwards > 0
    ? ratio(recent.generated, recent.forwards)
    : ratio(total.generated_tokens, total.target_forwards);
}

function setText(id, text, small) {
  const element = byId(id);
  element.textContent = text;
  if (small === undefined) return;
  const line = document.createElement("small");
  line.textContent = small;
  element.append(line);
}

function versionsOf(engine) {
  const parts = Object.entries(engine.weight_versions);
  const distinct = new Set(parts.map(([, version]) => version));
  if (distinct.size === 1) return String([...distinct][0]);
  return parts.map(([part, version]) => `${part} ${version}`).join(", ");
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function setState(state, words, reason = "") {
  byId("state").dataset.state = state;
  byId("state").textContent = words;
  byId("reason").textContent = reason;
  byId("reason").hidden = !reason;
}

function showState(body) {
  const { engine } = body;
  const busy = engine.running + engine.waiting > 0;
  if (engine.unavailable_reason) setState("stopped", "not generating", engine.unavailable_reason);
  else if (body.draining) setState("draining", "draining", "No new requests are taken: the server ends when these have ended.");
  else if (busy) setState("generating", "generating");
  else setState("idle", "idle");
  const late = body.age > STALE_SECONDS;
  byId("since").textContent = late
    ? `as of ${duration(body.age)} ago: the engine is in a long step or an update`
    : `up ${duration(body.uptime)}`;
  document.title = `${engine.unavailable_reason ? "stopped" : whole(engine.running)} · ${body.model}`;
}

function saved({ engine, saved_seconds: seconds, saved_error_seconds: error, speedup }) {
  const { total } = engine;
  if (!total.drafted) return ["–", "nothing was drafted"];
  if (!total.forecast_steps) return ["–", "not measured: needs spec.budget=learned"];
  if (error === null) return ["–", speedup];
  return [`${decimal(seconds, 1)} ± ${decimal(error, 1)} s`, speedup];
}

function milliseconds(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${decimal(1000 * seconds, seconds < 0.1 ? 1 : 0)} ms` : `${decimal(seconds, 2)} s`;
}

function showTiles(body) {
  const { engine, latency } = body;
  const { total } = engine;
  const share = (count) => decimal(100 * ratio(count, engine.kv_slots), 1);
  setText("running", whole(engine.running));
  setText("waiting", whole(engine.waiting));
  setText("rate", decimal(tokensPerSecond(), 0));
  setText("accept", decimal(acceptLength(total), 2),
    `${decimal(ratio(total.generated_tokens, total.target_forwards), 2)} since the start`);
  setText("saved", ...saved(body));
  setText("first-token", milliseconds(latency.first_token_seconds), "median of recent samples");
  setText("per-token", milliseconds(latency.token_seconds), "median of recent samples");
  setText("kv", `${share(engine.kv_used)} %`, `${share(engine.kv_cached)} % cached`);
  setText("finished", whole(total.finished));
  setText("generated", whole(total.generated_tokens));
  setText("versions", versionsOf(engine));
}

function showHistory() {
  const now = samples.at(-1).time;
  const begun = Math.min(samples[0].time, now - 60);
  const steps = samples.slice(1).map((sample, index) => ({ from: samples[index], to: sample }));
  const rates = steps.map(({ from, to }) =>
    [to.time, ratio(to.generated - from.generated, to.time - from.time)]);
  const accepted = steps.map(({ from, to }) =>
    [to.time, ratio(to.generated - from.generated, to.forwards - from.forwards)]);
  const of = (name) => samples.flatMap((sample, index) => {
    const late = index > 0 && sample.time - samples[index - 1].time > GAP_SECONDS;
    return [...(late ? [[sample.time, NaN]] : []), [sample.time, sample[name]]];
  });
  overTime("rate-chart", begun, now, [{ label: "tokens/s", points: rates }]);
  overTime("requests-chart", begun, now,
    [{ label: "running", points: of("running") }, { label: "waiting", points: of("waiting") }]);
  overTime("accept-chart", begun, now, [{ label: "accept length", points: accepted }]);
}

function overTime(id, begun, now, lines) {
  const heights = lines.flatMap(({ points }) => points.map(([, y]) => y)).filter(Number.isFinite);
  drawChart(byId(id), {
    lines: lines.map(({ label, points }) => ({ label, points: points.map(([time, y]) => [time - now, y]) })),
    x: { from: begun - now, to: 0 },
    y: { from: 0, to: Math.max(1, ...heights) * 1.05 },
    xLabel: "seconds",
    height: 150,
  });
}

// Of a cluster that learns per replica, the first replica's.
function learnedOf(engine) {
  const all = [engine, ...Object.values(engine.replicas)];
  return all.map(({ learned }) => learned?.budget).find((budget) => budget?.cost) ?? {};
}

// Only what was measured: the engine's own curve goes on beyond that by extrapolation.
function showCost({ engine }) {
  const { cost } = learnedOf(engine);
  const measured = (cost?.rows ?? []).flatMap((rows, at) => (cost.observations[at] > 0 ? [[rows, cost.milliseconds[at]]] : []));
  const lines = measured.length ? [{ label: "learned", points: measured, dots: true }] : [];
  byId("cost").hidden = !lines.length;
  if (!lines.length) return;
  const step = engine.last_step;
  const marks = step.query_tokens > 0 && step.forward_ms > 0
    ? [{ label: "the latest step", points: [[step.query_tokens, step.forward_ms]], series: lines.length }] : [];
  const points = [...lines, ...marks].flatMap((each) => each.points);
  const [rows, heights] = [points.map(([x]) => x), points.map(([, y]) => y)];
  drawChart(byId("cost-chart"), {
    lines,
    marks,
    x: { from: Math.min(...rows), to: Math.max(...rows, Math.min(...rows) + 1), log: true },
    y: { from: Math.min(...heights) * 0.9, to: Math.max(...heights) * 1.1, log: true },
    xLabel: "query tokens",
    height: 280,
  });
}

function showValues({ engine }) {
  const { calibration } = learnedOf(engine);
  byId("values").hidden = !calibration;
  if (!calibration) return;
  const sum = (values) => values.reduce((one, other) => one + other, 0);
  fill("values", calibration.sources.map((source, row) => {
    const [nodes, expected, accepted] = [calibration.count, calibration.expected, calibration.accepted].map((table) => sum(table[row]));
    return [
      SOURCES[source] ?? source, decimal(nodes, 0), decimal(expected, 0), decimal(accepted, 0),
      expected < FEWEST_EXPECTED ? "–" : `${decimal(ratio(accepted, expected), 2)}x`,
    ];
  }));
}

// cells: texts, or functions that fill their cell.
function fill(id, rows) {
  byId(id).querySelector("tbody").replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const made = row.insertCell();
      if (typeof cell === "function") cell(made);
      else made.textContent = cell;
    }
    return row;
  }));
}

function showReplicas({ engine }) {
  const replicas = Object.entries(engine.replicas);
  byId("replicas").hidden = !replicas.length;
  fill("replicas", replicas.map(([name, replica]) => {
    const counts = (sample) => sample.replicas[name];
    return [
      name, leftCell(replica.unavailable_reason || "ready"), whole(replica.running), whole(replica.waiting),
      decimal(tokensPerSecond(counts), 0), decimal(acceptLength(replica.total, counts), 2),
      `${decimal(100 * ratio(replica.kv_used, replica.kv_slots), 1)} %`, versionsOf(replica),
    ];
  }));
}

function leftCell(text) {
  return (cell) => {
    cell.className = "text";
    cell.textContent = text;
  };
}

function showCorpora({ engine }) {
  byId("corpora").hidden = !engine.corpora.length;
  fill("corpora", engine.corpora.map((corpus) => [
    corpus.name,
    (cell) => {
      cell.className = "text";
      const state = corpus.state === "published" ? "in use" : corpus.state;
      cell.textContent = corpus.error ? `${state}: ${corpus.error}` : state;
      if (corpus.state !== "loading") return;
      const bar = document.createElement("progress");
      if (corpus.progress !== null) bar.value = corpus.progress;
      cell.append(corpus.progress === null ? " " : ` ${decimal(100 * corpus.progress, 0)} % `, bar);
    },
    whole(corpus.num_tokens),
    decimal(corpus.num_bytes / 1e6, 1),
  ]));
}

function show(body) {
  byId("model").textContent = body.model;
  remember(sampleOf(body));
  byId("key-form").hidden = true;
  byId("forget").hidden = !sessionStorage.getItem(KEY);
  byId("content").hidden = false;
  for (const part of [showState, showTiles, showHistory, showReplicas, showCost, showValues, showCorpora]) part(body);
}

function askForKey() {
  const refused = sessionStorage.getItem(KEY) !== null;
  sessionStorage.clear();
  samples = [];
  byId("content").hidden = true;
  setState("waiting", refused ? "the key was refused" : "a key is needed");
  byId("since").textContent = "";
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

async function poll() {
  const key = sessionStorage.getItem(KEY);
  try {
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const response = await fetch("status", {
      headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    answeredAt = performance.now();
    if (response.status === 401 || response.status === 403) return askForKey();
    const body = await response.json();
    if (response.ok) show(body);
    else setState("unreachable", `error ${response.status}`, body.error?.message ?? "");
  } catch (error) {
    setState("unreachable", "no answer from the server", String(error));
  }
}

function showAge() {
  const age = (performance.now() - answeredAt) / 1000;
  const stale = age > STALE_SECONDS && byId("key-form").hidden;
  byId("content").classList.toggle("stale", stale);
  if (stale) byId("since").textContent = `no answer for ${duration(age)}`;
}

// While the tab is hidden or a key is asked for, nothing is polled until `wake` is called.
async function follow() {
  for (;;) {
    await poll();
    const asks = document.hidden || !byId("key-form").hidden;
    await new Promise((resolve) => {
      wake = resolve;
      if (!asks) setTimeout(resolve, EVERY_MS);
    });
  }
}

document.addEventListener("visibilitychange", () => document.hidden || wake());
addEventListener("pagehide", () => {
  const left = { at: Date.now(), model: byId("model").textContent, samples };
  if (samples.length) sessionStorage.setItem(HISTORY, JSON.stringify(left));
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  wake();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  wake();
});
setInterval(showAge, 1000);
follow();
