// The view Requests: what runs, waits and has ended, why it went so, and the operator's abort.

import { useEffect, useState } from "preact/hooks";
import { ask } from "./api.js";
import { html } from "./html.js";

const EVERY = 1000;

/** @type {[string, (row: any) => any][]} */
const COLUMNS = [
  ["Key", (row) => row.tenant || "–"],
  ["Route", (row) => row.path],
  ["State", (row) => row.state],
  ["Age", (row) => age(Date.now() / 1000 - row.received)],
  ["Prompt", (row) => row.prompt_tokens],
  ["Cached", (row) => row.cached_tokens],
  ["Answer", (row) => row.completion_tokens],
  ["tok/s", (row) => row.tokens_per_second ?? "–"],
  ["First token", (row) => (row.first_token_seconds === null ? "–" : `${row.first_token_seconds.toFixed(3)} s`)],
  ["Finish", (row) => row.finish ?? "–"],
];

/** @param {number} seconds */
function age(seconds) {
  return seconds < 60 ? `${seconds.toFixed(0)} s` : seconds < 3600 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** @param {{place: string}} props */
export function Requests({ place }) {
  const [answer, setAnswer] = useState(/** @type {any} */ (null));
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let open = true;
    /** @type {any} */
    let timer;
    const beat = async () => {
      try {
        if (!document.hidden) setAnswer(await ask("/live/requests"));
        setProblem("");
      } catch (error) {
        setProblem(/** @type {Error} */ (error).message);
      }
      if (open) timer = setTimeout(beat, EVERY);
    };
    void beat();
    return () => {
      open = false;
      clearTimeout(timer);
    };
  }, []);
  return html`<div class="requests">
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${place && html`<${Why} id=${place} />`}
    ${answer && html`<${Table} answer=${answer} chosen=${place} onProblem=${setProblem} />`}
  </div>`;
}

/** @param {{answer: any, chosen: string, onProblem: (problem: string) => void}} props */
function Table({ answer, chosen, onProblem }) {
  /** @param {string} id */
  const abort = async (id) => {
    try {
      await ask("/abort_request", { rid: id });
    } catch (error) {
      onProblem(/** @type {Error} */ (error).message);
    }
  };
  return html`<table>
    <caption>Requests of replica ${answer.replica}</caption>
    <thead>
      <tr>
        <th scope="col">Request</th>
        ${COLUMNS.map(([head]) => html`<th scope="col">${head}</th>`)}
        <th scope="col"><span class="unseen">Abort</span></th>
      </tr>
    </thead>
    <tbody>
      ${answer.requests.map(
        (/** @type {any} */ row, /** @type {number} */ i) =>
          html`<tr key=${`${i} ${row.id}`} aria-current=${row.id === chosen}>
            <td><a href=${`#requests/${encodeURIComponent(row.id)}`}>${row.id}</a></td>
            ${COLUMNS.map(([, of]) => html`<td>${of(row)}</td>`)}
            <td>
              ${
                !["ended", "failed", "client left"].includes(row.state) &&
                html`<button type="button" aria-label=${`Abort ${row.id}`} onClick=${() => void abort(row.id)}>Abort</button>`
              }
            </td>
          </tr>`,
      )}
    </tbody>
  </table>`;
}

/** @param {{id: string}} props */
function Why({ id }) {
  const [lines, setLines] = useState(/** @type {string[] | null} */ (null));
  const [problem, setProblem] = useState("");
  const load = async () => {
    try {
      setLines((await ask(`/live/requests/${encodeURIComponent(id)}`)).lines);
      setProblem("");
    } catch (error) {
      setProblem(/** @type {Error} */ (error).message);
    }
  };
  useEffect(() => void load(), [id]);
  return html`<section class="why" aria-label="Decisions about the request">
    <h2>Why ${id}</h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${lines && (lines.length ? html`<ol>${lines.map((line) => html`<li>${decision(line)}</li>`)}</ol>` : html`<p>The scheduler does not know it any more.</p>`)}
    <button type="button" onClick=${load}>Again</button> <a href="#requests">Close</a>
  </section>`;
}

/** A line without the request's id, which the heading has. @param {string} line */
function decision(line) {
  const [, time, text] = /^.*?: (\S+Z) (.*)$/s.exec(line) ?? [];
  return time ? html`<time datetime=${time}>${new Date(time).toLocaleTimeString()}</time> ${text}` : line;
}
