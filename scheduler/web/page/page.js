// The page of the scheduler: one stream of events in, the document out. Texts of others are shown as text only.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SILENT_MS = 25000;  // the scheduler says something every 10 s
const AGAIN_MS = 3000;
const HIDDEN_MS = 30000;  // a page that nobody sees gives its place away
const STEPS_SHOWN = 10;
const KINDS = {
  good: ["running", "serving", "succeeded"],
  warn: ["suspect", "stalled", "draining", "leaving", "moving", "pausing", "paused", "cancelling"],
  bad: ["failed", "gone", "quarantined"],
};
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let state = null;  // what the scheduler has told so far
let told = {unix_s: 0, clock_s: 0, at_ms: 0};  // its clocks, when it last told something
let stream = null;
let heard_ms = 0;
let chosen_by_hand = false;

// Numbers and words ---------------------------------------------------------------------------------------------------

const since = () => (performance.now() - told.at_ms) / 1000;
const nowUnix = () => told.unix_s + since();

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
}

function figure(value, digits = 3) {
  if (value === undefined) return "";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** A loss, with the same digits wherever it stands. */
const nats = (value) => (value === undefined ? "" : value.toPrecision(4));

function pace(seconds) {
  if (seconds === undefined) return "";
  return seconds < 1 ? `${figure(seconds * 1000)} ms` : `${figure(seconds)} s`;
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
const entries = (object) => Object.entries(object || {});
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Apply a JSON merge patch. */
function merge(target, changes) {
  const into = isObject(target) ? target : Object.create(null);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) delete into[name];
    else into[name] = isObject(value) ? merge(into[name], value) : value;
  }
  return into;
}

// The document --------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Set a text only if it is another one, so that nobody's selection and no screen reader is disturbed. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keep the children of a container as the items are, in order; a child stays as long as its key does. */
function keep(container, items, build, update) {
  const known = new Map([...container.children].map((node) => [node.dataset.key, node]));
  let place = container.firstElementChild;
  for (const [key, item] of items) {
    let node = known.get(key);
    if (node) known.delete(key);
    else {
      node = build(key, item);
      node.dataset.key = key;
    }
    update(node, item, key);
    if (node === place) place = place.nextElementSibling;
    else container.insertBefore(node, place);
  }
  for (const node of known.values()) node.remove();
}

function badge(node, name) {
  say(node, name);
  const kind = Object.keys(KINDS).find((one) => KINDS[one].includes(name)) || "";
  if (node.className !== `badge ${kind}`) node.className = `badge ${kind}`;
}

/** A row of a table whose cells the phone shows as a card, so their roles are said. */
function row(labels, head) {
  const cells = labels.map(([label, kind]) => make("td", {role: "cell", class: kind, "data-label": label}));
  return make("tr", {role: "row"}, make("th", {scope: "row", role: "rowheader"}, head), ...cells);
}

function roles(table) {
  table.setAttribute("role", "table");
  for (const part of [table.tHead, ...table.tBodies]) part.setAttribute("role", "rowgroup");
  table.tHead.rows[0].setAttribute("role", "row");
  for (const cell of table.tHead.rows[0].cells) cell.setAttribute("role", "columnheader");
}

// Jobs ----------------------------------------------------------------------------------------------------------------

const ENDED = ["succeeded", "failed", "cancelled"];
const JOB_CELLS = [["", ""], ["step", "n"], ["loss", "n"], ["tokens/s", "n"], ["left", "n"], ["", "text"]];

function showJobs() {
  const jobs = entries(state.jobs).sort(([, a], [, b]) =>
    ENDED.includes(a.state) - ENDED.includes(b.state) || b.created_unix_s - a.created_unix_s);
  $("jobs-empty").hidden = jobs.length > 0;
  $("jobs").hidden = jobs.length === 0;
  const more = state.jobs_in_all - jobs.length;
  say($("jobs-count"), more > 0 ? `the newest ${jobs.length} of ${state.jobs_in_all}` : "");
  const build = (id) => {
    const node = row(JOB_CELLS, make("a", {href: `#job=${encodeURIComponent(id)}`}, id));
    node.cells[1].append(make("span", {class: "badge"}));
    return node;
  };
  keep($("jobs").tBodies[0], jobs, build, (node, job, id) => {
    if (state.job && state.job.id === id) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
    const [, name, step, loss, speed, left, reason] = node.cells;
    badge(name.firstElementChild, job.state);
    say(step, `${job.step} / ${job.steps}`);
    say(loss, nats(job.loss));
    say(speed, figure(job.tokens_per_s));
    say(left, job.eta_s === undefined ? "" : span(job.eta_s));
    const rank = job.priority ? `, priority ${job.priority}` : "";
    const is_below = state.job && state.job.id === id;  // with its reason in full
    say(reason, (job.place ? `No. ${job.place} in the queue${rank}: ` : "") + (is_below ? "see below" : job.reason || ""));
  });
}

function showJob() {
  const full = state.job, job = full && state.jobs[full.id];
  $("job").hidden = !job;
  if (!job) return;
  say($("job-title"), full.id);
  const owner = job.owner ? ` Submitted by ${job.owner}.` : "";
  say($("job-reason"), `${job.state}: ${job.reason || ""}`);
  say($("job-hint"), (job.hint || "") + owner);
  $("job-hint").hidden = !$("job-hint").textContent;
  $("job-progress").max = job.steps;
  const reached = Math.max(job.step, full.reached || 0);
  $("job-progress").value = reached;
  $("job-progress").className = reached > job.step ? "before" : "";
  const figures = [
    ["Step", `${job.step}`, ` of ${job.steps}`],
    ["Loss", nats(job.loss) || "–", ""],
    ["Validation", nats(job.validation_loss) || "–", job.validation_step ? ` after step ${job.validation_step}` : ""],
    ["Tokens/s", figure(job.tokens_per_s) || "–", ""],
    ["Time left", job.eta_s === undefined ? "–" : span(job.eta_s), ""],
    ["Trained for", full.trained ? span(trainedFor(job, full.trained)) : "–", ""],
    ["Checkpoint", job.checkpoint_step ? `step ${job.checkpoint_step}` : "none yet",
      job.checkpoint_step ? `, ${span(nowUnix() - job.checkpoint_unix_s)} ago` : ""],
    ["Microbatches", figure(full.ledger.committed), `, ${full.ledger.in_flight} in work`],
    ["Done again", figure(full.ledger.replayed), full.ledger.replayed === 1 ? " microbatch" : " microbatches"],
  ];
  if (reached > job.step) figures.splice(1, 0, ["Had come to", `step ${reached}`, ""]);
  if (job.lost_steps) figures.push(["Lost so far", figure(job.lost_steps), job.lost_steps === 1 ? " step" : " steps"]);
  keep($("figures"), figures.map((one) => [one[0], one]),
    (name) => make("div", {}, make("dt", {}, name), make("dd", {}, make("span"), make("small"))),
    (node, [, value, unit]) => {
      say(node.lastElementChild.firstElementChild, value);
      say(node.lastElementChild.lastElementChild, unit);
    });
}

const trainedFor = (job, {for_s, until_unix_s}) => for_s + (job.state === "running" ? Math.max(0, nowUnix() - until_unix_s) : 0);

/** The islands of a job by number; a job without any is one, which has no number. */
const islands = () => (state.job.islands ? entries(state.job.islands) : [["", state.job]]);

function showStages() {
  const all = islands().flatMap(([, island]) => entries(island.stages));
  const most = Math.max(4, ...all.flatMap(([, stage]) => entries(stage.replicas).map(([, one]) => one.load || 0)));
  const build = (number) => {
    const stages = make("div", {class: "stages"});
    if (number === "") return make("div", {}, stages);
    const title = make("h4", {id: `island-${number}`});
    return make("section", {class: "island", "aria-labelledby": title.id}, title, make("p"), stages);
  };
  keep($("stages"), islands(), build, (node, island, number) => {
    if (number !== "") {
      say(node.children[0], `Island ${number}`);
      const is_lost = island.step === undefined;
      const made = is_lost ? "" : `step ${island.step}, ${count(island.exchanges, "exchange")}; `;
      say(node.children[1], made + island.waits_for);
    }
    showIsland(node.lastElementChild, island, number, most);
  });
}

function showIsland(place, island, island_number, most) {
  const build = (number) => {
    const title = make(island_number === "" ? "h4" : "h5", {id: `stage-${island_number}-${number}`});
    return make("section", {class: "stage", "aria-labelledby": title.id}, title, make("p"), make("ul", {class: "replicas"}));
  };
  keep(place, entries(island.stages), build, (node, stage, number) => {
    const [title, about, list] = node.children;
    const replicas = entries(stage.replicas);
    say(title, `Stage ${number}`);
    const does = stage.microbatches_per_s === undefined ? "" : `, ${figure(stage.microbatches_per_s)} microbatches/s`;
    const limits = stage.limits ? `; it limits the ${island_number === "" ? "job" : "island"}` : "";
    say(about, `${count(stage.layers, "layer")}, ${count(replicas.length, "replica")}${does}${limits}`);
    node.classList.toggle("limits", Boolean(stage.limits));
    if (!replicas.length && !ENDED.includes(state.jobs[state.job.id]?.state)) say(about, `${count(stage.layers, "layer")}; waits for a machine`);
    keep(list, replicas, replica, (item, one, id) => {
      const [head, facts, why, load] = item.children;
      say(head.firstElementChild, id);
      badge(head.lastElementChild, one.health);
      const work = one.load === undefined ? "" : `${count(one.load, "microbatch")} to do`;
      say(facts, [one.pace_s === undefined ? "" : `${pace(one.pace_s)} each`, work, one.device].filter(Boolean).join(", "));
      say(why, one.health === "serving" ? "" : one.why || "");
      why.hidden = !why.textContent;
      load.firstElementChild.style.width = `${100 * (one.load || 0) / most}%`;
    });
  });
}

function replica() {
  const head = make("div", {}, make("span", {class: "name"}), make("span", {class: "badge"}));
  return make("li", {class: "replica"}, head, make("p"), make("p"), make("span", {class: "load", "aria-hidden": "true"}, make("span")));
}

const WHY_MOVED = {
  timeout: "as one was late or was not heard",
  gone: "as one was gone",
  refused: "as what one did was not accepted",
};

function showNews() {
  // While a job stalls, each line repeats the one before and adds to it: the newest says all.
  const items = entries(state.job.news).reverse().filter(([, one], index, all) =>
    !(index && one.text.startsWith("job is stalled: ") && all[index - 1][1].text.slice(0, 60) === one.text.slice(0, 60)));
  const job = state.jobs[state.job.id];
  keep($("news"), items, () => make("li", {}, make("time"), make("span")), (node, one) => {
    const at = new Date(one.at_unix_s * 1000);
    node.className = one.level;
    node.firstElementChild.dateTime = at.toISOString();
    say(node.firstElementChild, at.toLocaleTimeString());
    const is_above = job && job.reason && one.text.endsWith(`: ${job.reason}`);
    say(node.lastElementChild, is_above ? `${one.text.slice(0, -job.reason.length - 2)}: see above` : one.text);
  });
  const reasons = entries(state.job.reroutes);
  const sum = reasons.reduce((all, [, number]) => all + number, 0);
  const each = reasons.map(([reason, number]) => `${number} ${WHY_MOVED[reason] || reason}`).join(", ");
  say($("reroutes"), sum ? `${count(sum, "microbatch")} given to another replica: ${each}. Those that had been computed already are done again.` : "No microbatch was given to another replica.");
  $("why").hidden = !state.job.facts.length;
  $("facts").replaceChildren(...state.job.facts.flatMap((fact) => [make("dt", {}, fact.topic), make("dd", {}, fact.text)]));
}

// Curves --------------------------------------------------------------------------------------------------------------

/** Round numbers between low and high, about so many. */
function ticks(low, high, about) {
  const rough = (high - low || Math.abs(high) || 1) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(10)) || 0);
  return found;
}

const points = (curve) => entries(curve).map(([step, value]) => [Number(step), value]);

/** Draw curves over steps: [class, name, points] each; `summary` is said below, and to who cannot see them. */
function chart(place, series, summary, fromZero) {
  const [svg, caption] = place.children.length ? place.children : [draw("svg", {"aria-hidden": "true"}), make("figcaption")];
  if (!svg.parentNode) place.append(svg, caption);
  place.dataset.summary = summary;
  if (!svg.dataset.at) say(caption, summary);
  const all = series.flatMap(([, , found]) => found);
  const width = place.clientWidth, height = 190, left = 46, right = 10, top = 8, bottom = 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  if (!all.length || width < 80) return;
  const steps = all.map(([step]) => step), values = all.map(([, value]) => value);
  const x0 = Math.min(...steps), x1 = Math.max(...steps, x0 + 1);
  let y0 = fromZero ? 0 : Math.min(...values), y1 = Math.max(...values);
  const room = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  y1 += room;
  if (!fromZero) y0 -= room;
  const x = (step) => left + (step - x0) / (x1 - x0) * (width - left - right);
  const y = (value) => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  for (const tick of ticks(y0, y1, 5)) {
    svg.append(draw("line", {class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick)}));
    svg.append(draw("text", {class: "axis", x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, figure(tick, 4)));
  }
  for (const tick of ticks(x0, x1, Math.max(2, width / 110)).filter(Number.isInteger)) {
    svg.append(draw("text", {class: "axis", x: x(tick), y: height - 6, "text-anchor": "middle"}, figure(tick, 6)));
  }
  for (const [kind, , found] of series) {
    svg.append(draw("polyline", {class: `curve ${kind}`, points: found.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ")}));
    if (kind === "validation") for (const [step, value] of found) svg.append(draw("circle", {class: "dot", cx: x(step), cy: y(value), r: 3.5}));
  }
  svg.onpointermove = (event) => {
    const step = x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0);
    const nearest = (found) => found.reduce((best, one) => (Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best));
    const [at] = nearest(series.find(([, , found]) => found.length)[2]);
    const line = svg.querySelector(".cursor") || svg.appendChild(draw("line", {class: "cursor", y1: top, y2: height - bottom}));
    line.setAttribute("x1", x(at));
    line.setAttribute("x2", x(at));
    svg.dataset.at = at;
    const told = series.filter(([, , found]) => found.length).map(([, name, found]) => [name, nearest(found)]);
    say(caption, told.map(([name, [where, value]]) => `step ${where}: ${name} ${figure(value, 4)}`).join("; "));
  };
  svg.onpointerleave = () => {
    delete svg.dataset.at;
    svg.querySelector(".cursor")?.remove();
    say(caption, place.dataset.summary);
  };
}

function showCurves() {
  const curves = state.job.curves;
  const before = points(curves.before), loss = points(curves.loss), validation = points(curves.validation), speed = points(curves.speed);
  const last = (found) => found[found.length - 1];
  const least = (found) => found.reduce((best, one) => (one[1] < best[1] ? one : best));
  const lossText = loss.length
    ? `${nats(last(loss)[1])} after step ${last(loss)[0]}, from ${nats(loss[0][1])} after step ${loss[0][0]}` +
      (validation.length ? `; validation (dashed) ${nats(last(validation)[1])}, least ${nats(least(validation)[1])} after step ${least(validation)[0]}` : "")
    : before.length ? "" : "No step is committed yet.";
  const lostText = before.length ? `before steps were lost (dotted): ${nats(last(before)[1])} after step ${last(before)[0]}` : "";
  const texts = [lossText, lostText].filter(Boolean).join("; ");
  chart($("loss"), [["loss", "loss", loss], ["validation", "validation", validation], ["before", "before", before]], texts, false);
  const mean = speed.reduce((sum, [, value]) => sum + value, 0) / speed.length;
  const speedText = speed.length ? `${figure(last(speed)[1])} tokens/s after step ${last(speed)[0]}, ${figure(mean)} on average` : before.length ? "No step is committed since steps were lost." : "Not measured yet.";
  chart($("speed"), [["speed", "tokens/s", speed]], speedText, true);
}

// Steps ---------------------------------------------------------------------------------------------------------------

/** The newest steps of every island: [key, times, name, whether it is the first of its island]. */
function newestSteps() {
  const each = Math.max(3, Math.floor(2 * STEPS_SHOWN / (islands().length + 1)));
  return islands().flatMap(([island, {timeline}]) => entries(timeline).slice(-each).reverse().map(([step, times], index) => {
    const number = times.length > 5 ? times[5] : Number(step) + 1;
    return [`${island}.${step}`, times, number ? String(number) : "outer", island, index === 0];
  }));
}

function showTimeline() {
  const job = state.job && state.jobs[state.job.id];
  const shown = job ? newestSteps() : [];
  $("steps-section").hidden = shown.length === 0;
  if (!shown.length) return;
  const place = $("timeline"), width = place.clientWidth, several = Boolean(state.job.islands);
  const open = shown.some(([, times]) => times[3] === null) && job.state === "running";
  const now = open ? told.clock_s + since() : Math.max(...shown.flatMap(([, times]) => times.slice(0, 4).filter((time) => time !== null)));
  const first = Math.min(...shown.map(([, times]) => times[0]));
  const left = 46, line = 19, height = (shown.length + (several ? islands().length : 0)) * line + 22;
  const x = (at) => left + (at - first) / Math.max(0.001, now - first) * (width - left - 4);
  const svg = draw("svg", {viewBox: `0 0 ${width} ${height}`, height});
  for (const tick of ticks(first - now, 0, Math.max(2, width / 120))) {
    const at = x(now + tick);
    svg.append(draw("line", {class: "grid", x1: at, x2: at, y1: 0, y2: height - 20}));
    svg.append(draw("text", {class: "axis", x: at, y: height - 5, "text-anchor": tick === 0 ? "end" : "middle"}, tick === 0 ? (open ? "now" : "end") : `${figure(tick)} s`));
  }
  let top = 0;
  for (const [, times, name, island, is_first] of shown) {
    if (several && is_first) {
      svg.append(draw("text", {class: "axis", x: 0, y: top + 14}, `Island ${island}`));
      top += line;
    }
    const [began, full, averaged, agreed] = times.slice(0, 4).map((time) => time ?? now);
    svg.append(draw("text", {class: "axis", x: left - 8, y: top + 14, "text-anchor": "end"}, name));
    for (const [kind, from, to] of [["feeding", began, full], ["averaging", full, averaged], ["committing", averaged, agreed]]) {
      if (to > from) svg.append(draw("rect", {class: kind, x: x(from), y: top + 3, width: Math.max(1, x(to) - x(from)), height: line - 6, rx: 2}));
    }
    top += line;
  }
  place.replaceChildren(svg);
  const items = shown.map(([key, times, name, island]) => [key, [times, several ? `${name} of island ${island}` : name]]);
  keep($("steps").tBodies[0], items, () => row([["", "n"], ["", "n"], ["", "n"], ["", ""]], ""), (node, [times, name]) => {
    const [began, full, averaged, agreed, repeats] = times;
    say(node.cells[0], name);
    const took = (from, to) => (from === null ? "" : to === null ? "under way" : figure(to - from));
    [took(began, full), took(full, averaged), took(averaged, agreed)].forEach((text, index) => say(node.cells[index + 1], text));
    say(node.cells[4], repeats ? count(repeats, "time") : "");
  });
}

// The pool ------------------------------------------------------------------------------------------------------------

const POOL_CELLS = [["", ""], ["", "lines"], ["", "lines"], ["memory", "n"], ["a microbatch takes", "n"], ["to do", "n"], ["at", ""], ["slowest link", "lines"], ["for", "n"], ["", "text"]];

function showPool() {
  const peers = entries(state.peers).sort(([a, one], [b, other]) =>
    (one.job || "~").localeCompare(other.job || "~") || (one.stage ?? 0) - (other.stage ?? 0) || a.localeCompare(b));
  const shown = state.job && state.jobs[state.job.id];
  $("pool-empty").hidden = peers.length > 0;
  $("pool").hidden = peers.length === 0;
  const servers = peers.filter(([, one]) => one.state !== "relay").length;
  say($("pool-count"), state.peers_in_all > servers ? `${servers} of ${state.peers_in_all}` : servers ? count(servers, "stage server") : "");
  const build = (id) => {
    const node = row(POOL_CELLS, id);
    node.cells[1].append(make("span", {class: "badge"}));
    return node;
  };
  keep($("pool").tBodies[0], peers, build, (node, one) => {
    const [, name, serves, device, memory, speed, work, address, link, since_, why] = node.cells;
    badge(name.firstElementChild, one.state);
    const island = one.island === undefined ? "" : ` in island ${one.island}`;
    say(serves, one.job ? `stage ${one.stage}${island}\nof ${one.job}` : "");
    say(device, one.state === "relay" ? "" : (one.device || "") + (one.site ? ` at ${one.site}` : "") + (one.owner ? `\ninvited by ${one.owner}` : ""));
    say(memory, one.memory || "");
    say(speed, pace(one.pace_s));
    say(work, one.load === undefined ? "" : String(one.load));
    say(address, one.address || "");
    say(link, one.link || "");
    say(since_, span(nowUnix() - one.since_unix_s));
    const is_above = shown && one.why && (shown.reason || "").includes(one.why);
    say(why, one.state === "serving" ? "" : is_above ? "see above" : one.why || "");
  });
}

// All of it -----------------------------------------------------------------------------------------------------------

function showHead() {
  const {visitor, troubles, product} = state.scheduler;
  say($("visitor"), visitor.name ? `${visitor.role} ${visitor.name}` : "");
  say($("product"), `swarm ${product}.`);
  const text = troubles.join("\n");
  if ($("troubles").dataset.text !== text) {
    $("troubles").dataset.text = text;
    $("troubles").replaceChildren(...troubles.map((one) => make("p", {}, one)));
    $("troubles").hidden = !troubles.length;
  }
  const job = state.job && state.jobs[state.job.id];
  document.title = job ? `${job.state} ${job.step}/${job.steps} ${state.job.id}` : "swarm";
}

function show(changes) {
  showHead();
  showJobs();
  showJob();
  if (state.job && changes.job) {
    if (changes.job.stages || changes.job.islands) showStages();
    if (changes.job.news || changes.job.facts || changes.job.reroutes) showNews();
    if (changes.job.curves) showCurves();
  }
  if (changes.job || changes.jobs) showTimeline();
  if (changes.peers || !state.peers_in_all) showPool();
}

function take(event, isAll) {
  const {now_unix_s, clock_s, state: changes} = JSON.parse(event.data);
  told = {unix_s: now_unix_s, clock_s, at_ms: performance.now()};
  state = merge(isAll ? null : state, changes);
  heard_ms = performance.now();
  linked("live", "live");
  show(isAll ? {...changes, peers: true, job: changes.job || null} : changes);
  if (isAll && chosen_by_hand) {
    chosen_by_hand = false;
    $("job-title").focus();
  }
}

function linked(kind, text) {
  $("link").className = kind;
  say($("link"), text);
}

function dial() {
  stream?.close();
  heard_ms = performance.now();
  const job = new URLSearchParams(location.hash.slice(1)).get("job") || "";
  const mine = stream = new EventSource(`/events?job=${encodeURIComponent(job)}`);
  mine.addEventListener("all", (event) => mine === stream && take(event, true));
  mine.addEventListener("change", (event) => mine === stream && take(event, false));
  mine.addEventListener("refused", (event) => {
    mine.close();
    stream = null;
    linked("lost", JSON.parse(event.data).message);
  });
  mine.onerror = () => {
    if (mine !== stream) return;
    linked("lost", "not connected: the page shows what was; trying again");
    mine.close();
    setTimeout(() => mine === stream && !document.hidden && dial(), AGAIN_MS);
  };
}

addEventListener("hashchange", () => {
  chosen_by_hand = location.hash.startsWith("#job=");
  if (chosen_by_hand) dial();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && (!stream || stream.readyState === EventSource.CLOSED)) dial();
  else if (document.hidden) setTimeout(() => document.hidden && stream?.close(), HIDDEN_MS);
});
addEventListener("resize", () => {
  if (!state) return;
  if (state.job) showCurves();
  showTimeline();
});
setInterval(() => {
  if (stream && !document.hidden && performance.now() - heard_ms > SILENT_MS) dial();
}, 5000);
setInterval(() => {
  if (state && !document.hidden && !calm.matches) showTimeline();
}, 500);
$("job-title").tabIndex = -1;
for (const id of ["jobs", "pool", "steps"]) roles($(id));
dial();
