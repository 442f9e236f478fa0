// The view Raw: a text that the model continues, as base models need it; and texts and sound for models whose work is another
// one.

import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { endStream, send, stream } from "./api.js";
import { copy } from "./copying.js";
import { facts } from "./facts.js";
import { html } from "./html.js";
import { fieldsOf } from "./parameters.js";
import { colourOf, percent } from "./tokens.js";

/** @import {Values} from "./types.js" */

const PATH = "/v1/completions";
const VALUES = "tokenyard-raw";

/** @type {[string, string, Record<string, string | number>][]} */
const FIELDS = [
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "Seed", { step: 1 }],
];

/** The text is kept while the page is open. */
const kept = signal("");

/** @returns {Values} */
function storedValues() {
  try {
    return JSON.parse(localStorage.getItem(VALUES) ?? "{}");
  } catch {
    return {};
  }
}

export function Raw() {
  const task = facts.value?.task;
  const view = { paint: Pictures, speak: Speech, transcribe: Hearing }[/** @type {string} */ (task)] ?? Completion;
  return html`<section class="raw" aria-label="Raw"><${view} /></section>`;
}

function Completion() {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const run = useRef(/** @type {{controller: AbortController, body: object, id: string, last: string} | null} */ (null));
  const [values, setValues] = useState(storedValues);
  const [running, setRunning] = useState(false);
  const [problem, setProblem] = useState("");
  const [said, say] = useState("");
  useEffect(() => {
    if (box.current) box.current.textContent = kept.value;
    return () => stop();
  }, []);
  const stop = () => {
    if (!run.current) return;
    const { controller, body, id, last } = run.current;
    controller.abort();
    void endStream(PATH, body, id, last);
  };
  const set = (/** @type {string} */ name, /** @type {string} */ text) => {
    const next = { ...values, [name]: text === "" ? undefined : Number(text) };
    setValues(next);
    localStorage.setItem(VALUES, JSON.stringify(next));
  };
  const begin = async () => {
    const element = /** @type {HTMLElement} */ (box.current);
    // What was answered before is a part of the text now.
    element.textContent = kept.value = element.textContent ?? "";
    const id = `ui-${crypto.randomUUID?.() ?? Date.now()}`;
    const body = { prompt: kept.value, ...fieldsOf(values), logprobs: 5, stream: true };
    const own = { controller: new AbortController(), body, id, last: "" };
    run.current = own;
    setRunning(true);
    setProblem("");
    say("The model goes on.");
    let failed = "";
    try {
      for await (const event of stream(PATH, body, { signal: own.controller.signal, requestId: id })) {
        own.last = event.id;
        for (const choice of event.value.choices ?? []) append(element, choice);
      }
    } catch (error) {
      if (!own.controller.signal.aborted) failed = /** @type {Error} */ (error).message;
    }
    run.current = null;
    kept.value = element.textContent ?? "";
    setRunning(false);
    setProblem(failed);
    say(failed ? `It failed: ${failed}` : "The model has ended.");
  };
  const undo = () => {
    const element = /** @type {HTMLElement} */ (box.current);
    for (const answered of element.querySelectorAll(".answered")) answered.remove();
    kept.value = element.textContent ?? "";
  };
  /** @param {KeyboardEvent} event */
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!running) void begin();
    } else if (event.key === "Escape" && running) stop();
  };
  return html`<p>The model continues this text as it is, without a chat's form. What it adds is coloured by its probability.</p>
    <div
      class="raw-text"
      role="textbox"
      aria-multiline="true"
      aria-label="Text"
      tabindex="0"
      contenteditable=${running ? "false" : "plaintext-only"}
      spellcheck=${false}
      ref=${box}
      onInput=${() => (kept.value = box.current?.textContent ?? "")}
      onKeyDown=${onKeyDown}
    ></div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="unseen" role="status" aria-live="polite">${said}</p>
    <div class="raw-fields">
      ${FIELDS.map(
        ([name, label, limits]) =>
          html`<label>${label}<input type="number" ...${limits} value=${values[name] ?? ""}
            onInput=${(/** @type {any} */ e) => set(name, e.target.value)} /></label>`,
      )}
    </div>
    <div class="buttons">
      ${
        running
          ? html`<button type="button" class="primary" onClick=${stop}>Stop</button>`
          : html`<button type="button" class="primary" onClick=${begin}>Go on</button>
              <button type="button" onClick=${undo}>Take back</button>
              <button type="button" onClick=${(/** @type {any} */ e) => void copy(box.current?.textContent ?? "", e.currentTarget)}>Copy</button>`
      }
    </div>`;
}

/** Adds the tokens of a choice, each in its colour. @param {HTMLElement} element @param {any} choice */
function append(element, choice) {
  const { tokens = [], token_logprobs: logprobs = [], top_logprobs: tops = [] } = choice.logprobs ?? {};
  let rest = choice.text ?? "";
  tokens.forEach((/** @type {string} */ token, /** @type {number} */ i) => {
    // A character may be cut into tokens, and a token's text may be held back.
    const text = rest.startsWith(token) ? token : i === tokens.length - 1 ? rest : "";
    rest = rest.slice(text.length);
    if (text) element.append(coloured(text, logprobs[i], tops[i]));
  });
  if (rest) element.append(coloured(rest, 0, null));
}

/** @param {string} text @param {number} logprob @param {Record<string, number> | null} top */
function coloured(text, logprob, top) {
  const part = document.createElement("span");
  part.className = `answered ${colourOf(logprob ?? 0)}`;
  part.textContent = text;
  part.title = Object.entries(top ?? {})
    .map(([other, value]) => `${other}  ${percent(value)}`)
    .join("\n");
  return part;
}

/**
 * Runs one job at a time, and keeps why it failed.
 * @returns {[boolean, string, (job: () => Promise<void>) => void]}
 */
function useJob() {
  const [running, setRunning] = useState(false);
  const [problem, setProblem] = useState("");
  const begin = (/** @type {() => Promise<void>} */ job) => {
    setRunning(true);
    setProblem("");
    job()
      .catch((error) => setProblem(error.message))
      .finally(() => setRunning(false));
  };
  return [running, problem, begin];
}

function Pictures() {
  return html`<p>This model paints: see <a href="#images">Images</a>.</p>`;
}

function Speech() {
  const [text, setText] = useState("");
  const [url, setUrl] = useState("");
  const [running, problem, begin] = useJob();
  useEffect(() => () => URL.revokeObjectURL(url), [url]);
  const speak = () =>
    begin(async () => {
      const response = await send("/v1/audio/speech", JSON.stringify({ input: text, response_format: "wav" }), "application/json");
      setUrl(URL.createObjectURL(await response.blob()));
    });
  return html`<${Job} label="What is said" text=${text} setText=${setText} name="Speak" ...${{ running, problem }} onBegin=${speak} />
    ${url && html`<audio controls src=${url} aria-label="The sound"></audio>`}`;
}

function Hearing() {
  const [text, setText] = useState("");
  const [running, problem, begin] = useJob();
  const hear = (/** @type {File | undefined} */ file) => {
    if (!file) return;
    begin(async () => {
      const form = new FormData();
      form.append("file", file);
      const response = await send("/v1/audio/transcriptions", form);
      setText((await response.json()).text);
    });
  };
  return html`<label>A file with speech<input type="file" accept="audio/*" disabled=${running}
      onChange=${(/** @type {any} */ e) => hear(e.target.files[0])} /></label>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="plain" role="status">${running ? "The model listens." : text}</p>`;
}

/** @param {any} props */
function Job({ label, text, setText, name, running, problem, onBegin }) {
  return html`<label>${label}<textarea rows="3" value=${text} onInput=${(/** @type {any} */ e) => setText(e.target.value)}></textarea></label>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class="buttons">
      <button type="button" class="primary" disabled=${running || !text.trim()} onClick=${onBegin}>${running ? "Please wait" : name}</button>
    </div>`;
}
