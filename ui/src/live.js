// The view Live: charts of the last 15 minutes, made of /live once a second while the view is open.

import { useEffect, useRef } from "preact/hooks";
import { signal } from "@preact/signals";
import uPlot from "uplot";
import { facts, problem, refresh } from "./facts.js";
import { html } from "./html.js";

const KEPT_SECONDS = 900;
const EVERY = 1000;
// After this time without a word from a busy API process it is an idle one.
const QUIET_SECONDS = 2.5;

/**
 * A chart: its title, unit, and lines, each with a name and a value by the last two answers of /live.
 * @typedef {{title: string, unit: string, lines: [string, (now: any, before: any) => number | null][]}} Chart
 */

/** A count by second, of a number that only grows. @param {(live: any) => number | undefined} of */
function rate(of) {
  return (/** @type {any} */ now, /** @type {any} */ before) => {
    const [here, there] = [of(now), before && of(before)];
    const seconds = before ? now.time - before.time : 0;
    // A worker that was started again counts from zero.
    if (here === undefined || there === undefined || seconds <= 0 || here < there) return null;
    return (here - there) / seconds;
  };
}

/** Rates that were seen last, by API process and count. @type {Map<string, number>} */
const rates = new Map();

/**
 * A count by second, of all API processes. Each has its own time: what one has written of itself is up to a second old.
 * @param {"generated" | "prompt"} name
 */
function rateOfAll(name) {
  return (/** @type {any} */ now, /** @type {any} */ before) => {
    if (!before) return null;
    let all = 0;
    for (const here of now.replicas) {
      const there = before.replicas.find((/** @type {any} */ one) => one.replica === here.replica);
      const key = `${here.replica} ${name}`;
      const seconds = there ? here.time - there.time : 0;
      if (seconds > 0) rates.set(key, Math.max(0, here.totals[name] - there.totals[name]) / seconds);
      // A process to which nothing happens writes nothing.
      else if (now.time - here.time > QUIET_SECONDS) rates.set(key, 0);
      all += rates.get(key) ?? 0;
    }
    return all;
  };
}

/** The longest of a kind of wait among the API processes. @param {"first_token_ms" | "between_tokens_ms"} name @param {"p50" | "p99"} part */
function longest(name, part) {
  return (/** @type {any} */ now) => {
    const known = now.replicas.map((/** @type {any} */ one) => one[name]?.[part]).filter((/** @type {any} */ ms) => ms !== undefined);
    return known.length ? Math.max(...known) : null;
  };
}

/** A count of all API processes. @param {any} live @param {"generated" | "prompt" | "cached"} name @returns {number} */
const totalOf = (live, name) => live.replicas.reduce((/** @type {number} */ all, /** @type {any} */ one) => all + one.totals[name], 0);

/** @param {(worker: any) => number} of @returns {(live: any) => number} */
const sum = (of) => (live) => (live.scheduler?.workers ?? []).reduce((/** @type {number} */ all, /** @type {any} */ one) => all + of(one), 0);

const used = sum((worker) => worker.blocks_used);
const total = sum((worker) => worker.blocks_total);

/** @type {Chart[]} */
const CHARTS = [
  {
    title: "Tokens",
    unit: "a second",
    lines: [
      ["answers", rateOfAll("generated")],
      ["prompts", rateOfAll("prompt")],
    ],
  },
  {
    title: "Requests",
    unit: "",
    lines: [
      ["running", (now) => now.scheduler?.running ?? null],
      ["waiting", (now) => now.scheduler?.waiting ?? null],
    ],
  },
  {
    title: "First token",
    unit: "ms",
    lines: [
      ["p50", longest("first_token_ms", "p50")],
      ["p99", longest("first_token_ms", "p99")],
    ],
  },
  {
    title: "Between tokens",
    unit: "ms",
    lines: [
      ["p50", longest("between_tokens_ms", "p50")],
      ["p99", longest("between_tokens_ms", "p99")],
    ],
  },
  {
    title: "KV cache",
    unit: "%",
    lines: [
      ["used", (now) => (total(now) ? (100 * used(now)) / total(now) : null)],
      ["prompt tokens found", (now) => (totalOf(now, "prompt") ? (100 * totalOf(now, "cached")) / totalOf(now, "prompt") : null)],
    ],
  },
  { title: "Steps", unit: "a second", lines: [["all workers", rate(sum((worker) => worker.steps))]] },
];

const times = /** @type {number[]} */ ([]);
const values = CHARTS.map(({ lines }) => lines.map(() => /** @type {(number | null)[]} */ ([])));
const points = signal(0);
/** @type {any} */
let before = null;

/** Adds the newest answer of /live to all charts. */
function note() {
  const now = facts.value;
  if (!now || now === before) return;
  times.push(now.time);
  CHARTS.forEach(({ lines }, i) => lines.forEach(([, of], j) => values[i][j].push(of(now, before))));
  if (times.length > KEPT_SECONDS) {
    times.shift();
    for (const line of values.flat()) line.shift();
  }
  before = now;
  points.value += 1;
}

export function Live() {
  useEffect(() => {
    let open = true;
    /** @type {any} */
    let timer;
    const beat = async () => {
      if (!document.hidden) {
        await refresh();
        note();
      }
      if (open) timer = setTimeout(beat, EVERY);
    };
    void beat();
    return () => {
      open = false;
      clearTimeout(timer);
    };
  }, []);
  const live = facts.value;
  if (!live) return html`<div class="live"><p class="problem" role="alert">${problem.value || "Asking the server…"}</p></div>`;
  return html`<div class="live">
    ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
    <p>
      <strong>${live.ready ? "Ready" : `Not ready: ${live.reason}`}</strong>, replica ${live.replica} since
      ${" "}${new Date(1000 * live.since).toLocaleString()}, tokenyard ${live.version}.
      ${" "}${live.replicas.length > 1 ? "Waits are the longest among the API processes; all else is the whole server's." : ""}
    </p>
    <div class="charts">${CHARTS.map((chart, i) => html`<${Plot} key=${i} chart=${chart} lines=${values[i]} />`)}</div>
    <${Workers} live=${live} />
    ${live.replicas.length > 1 && html`<${Replicas} live=${live} />`}
    <${Facts} live=${live} />
  </div>`;
}

/** @param {{chart: Chart, lines: (number | null)[][]}} props */
function Plot({ chart, lines }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const moment = points.value;
  useEffect(() => {
    const element = /** @type {HTMLElement} */ (place.current);
    const ink = getComputedStyle(element).color;
    const colours = ["#2f9e5f", "#d9822b"];
    const axis = { stroke: ink, grid: { stroke: "#8884", width: 1 }, ticks: { show: false } };
    plot.current = new uPlot(
      {
        width: element.clientWidth,
        height: 150,
        legend: { show: false },
        cursor: { show: false },
        scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [axis, { ...axis, size: 52 }],
        series: [{}, ...chart.lines.map((_, i) => ({ stroke: colours[i], width: 1.5, points: { show: false } }))],
      },
      [times, ...lines],
      element,
    );
    return () => plot.current?.destroy();
  }, []);
  useEffect(() => plot.current?.setData([times, ...lines]), [moment]);
  const last = lines.map((line) => line.at(-1));
  return html`<figure>
    <figcaption>
      ${chart.title}${" "}
      ${chart.lines.map(
        ([name], i) =>
          html`<span class=${`line${i}`}>${name} <output>${shown(last[i])}</output></span> `,
      )}
      ${chart.unit}
    </figcaption>
    <div class="plot" aria-hidden="true" ref=${place}></div>
  </figure>`;
}

/** @param {number | null | undefined} value */
function shown(value) {
  return value === null || value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

/** @param {{live: any}} props */
function Workers({ live }) {
  const heads = ["Worker", "Device", "Computes by", "Epoch", "Running", "Blocks used", "of", "Cached", "Steps"];
  return html`<table>
    <caption>Workers</caption>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>
      ${(live.scheduler?.workers ?? []).map((/** @type {any} */ worker) => {
        const { index, device, backend, epoch, running, blocks_used, blocks_total, blocks_cached, steps } = worker;
        return html`<tr>
          ${[index, device, backend, epoch, running, blocks_used, blocks_total, blocks_cached, steps].map((cell) => html`<td>${cell}</td>`)}
        </tr>`;
      })}
    </tbody>
  </table>`;
}

/** @param {{live: any}} props */
function Replicas({ live }) {
  const heads = ["API process", "Since", "Prompt tokens", "Answer tokens", "First token p50", "p99", "Between tokens p50", "p99"];
  return html`<table class="replicas">
    <caption>API processes</caption>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>
      ${live.replicas.map((/** @type {any} */ one) => {
        const { replica, since, totals, first_token_ms: first, between_tokens_ms: between } = one;
        const times = [first?.p50, first?.p99, between?.p50, between?.p99].map((ms) => (ms === undefined ? "–" : `${shown(ms)} ms`));
        const cells = [new Date(1000 * since).toLocaleTimeString(), totals.prompt, totals.generated, ...times];
        return html`<tr key=${replica}>
          <th scope="row">${replica}${replica === live.replica ? " (this answer's)" : ""}</th>${cells.map((cell) => html`<td>${cell}</td>`)}
        </tr>`;
      })}
    </tbody>
  </table>`;
}

/** @param {{live: any}} props */
function Facts({ live }) {
  const counters = Object.entries(live.scheduler?.counters ?? {}).filter(([, count]) => count);
  return html`<dl>
    <dt>Model</dt><dd>${live.models.join(", ")} (${live.dtype})</dd>
    <dt>Longest prompt and answer</dt><dd>${live.max_model_len ?? "not known yet"} tokens</dd>
    <dt>Block</dt><dd>${live.scheduler?.block_size ?? "–"} tokens</dd>
    <dt>Requests at once</dt><dd>${live.scheduler?.max_running ?? "–"}</dd>
    <dt>Since the scheduler's start</dt><dd>${counters.map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`).join(", ") || "nothing"}</dd>
  </dl>`;
}
