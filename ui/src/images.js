// The view Images: a description becomes pictures, each by a stream of its own with previews. Only where a model paints.

import { signal } from "@preact/signals";
import { useState } from "preact/hooks";
import { stream } from "./api.js";
import { facts } from "./facts.js";
import { html } from "./html.js";

/**
 * What /live says of a model that paints.
 * @typedef {{model: string, size: string, num_inference_steps: number, guidance_scale: number}} Painter
 */

/**
 * One picture, finished or on its way: `url` is the newest preview or the picture, and `parts` of PARTS are there.
 * @typedef {{id: string, prompt: string, seed: number, size: string, url: string, parts: number, done: boolean, problem: string}} Picture
 */

const PATH = "/v1/images/generations";
const PREVIEWS = 3;
// The previews, and the picture.
const PARTS = PREVIEWS + 1;
const MOST_PICTURES = 10;
// Streams that are open at once: a browser has six connections to a server, and the other views need some.
const MOST_STREAMS = 4;
// Pictures that the page keeps while it is open.
const MOST_KEPT = 60;
const MOST_RANDOM_SEED = 2 ** 31;

const pictures = signal(/** @type {Picture[]} */ ([]));
const running = signal(/** @type {AbortController | null} */ (null));
/** The fields as they were written. */
const values = signal(/** @type {Record<string, string>} */ ({}));

/** @param {string} id @param {Partial<Picture>} changes */
function change(id, changes) {
  pictures.value = pictures.value.map((one) => (one.id === id ? { ...one, ...changes } : one));
}

/** @param {Picture} picture @param {object} body @param {AbortSignal} ending */
async function paint({ id }, body, ending) {
  try {
    for await (const { value } of stream(PATH, body, { signal: ending, requestId: id })) {
      const done = value.type === "image_generation.completed";
      const parts = done ? PARTS : value.partial_image_index + 1;
      change(id, { url: `data:image/png;base64,${value.b64_json}`, size: value.size, parts, done });
      if (done) return;
    }
    change(id, { problem: "The answer ended before the picture was done." });
  } catch (error) {
    change(id, { problem: ending.aborted ? "Stopped." : /** @type {Error} */ (error).message });
  }
}

/** Begins the pictures that the fields ask for. @param {string} model */
async function begin(model) {
  const { prompt = "", size = "", count = "1", seed = "", steps = "", guidance = "" } = values.value;
  const first = seed === "" ? Math.floor(Math.random() * MOST_RANDOM_SEED) : Number(seed);
  const fields = {
    model,
    prompt,
    stream: true,
    partial_images: PREVIEWS,
    output_format: "png",
    ...(size.trim() && { size: size.trim() }),
    ...(steps && { num_inference_steps: Number(steps) }),
    ...(guidance && { guidance_scale: Number(guidance) }),
  };
  const number = Math.min(Math.max(Number(count) || 1, 1), MOST_PICTURES);
  const begun = Array.from({ length: number }, (_, i) => blank(prompt, first + i));
  pictures.value = [...begun, ...pictures.value].slice(0, MOST_KEPT);
  const controller = new AbortController();
  running.value = controller;
  const waiting = [...begun];
  const next = async () => {
    for (let one = waiting.shift(); one; one = waiting.shift()) await paint(one, { ...fields, seed: one.seed }, controller.signal);
  };
  await Promise.all(Array.from({ length: MOST_STREAMS }, next));
  running.value = null;
}

/** @param {string} prompt @param {number} seed @returns {Picture} */
function blank(prompt, seed) {
  const id = `ui-${crypto.randomUUID?.() ?? `${Date.now()}-${seed}`}`;
  return { id, prompt, seed, size: "", url: "", parts: 0, done: false, problem: "" };
}

export function Images() {
  /** @type {Painter[]} */
  const painters = facts.value?.paints ?? [];
  const [named, setNamed] = useState("");
  const painter = painters.find(({ model }) => model === named) ?? painters[0];
  if (!painter) return html`<section class="images" aria-label="Images"><p>No model of this server paints.</p></section>`;
  const start = () => {
    if (!running.value && values.value.prompt?.trim()) void begin(painter.model);
  };
  /** @param {KeyboardEvent} event */
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      start();
    } else if (event.key === "Escape") running.value?.abort();
  };
  return html`<section class="images" aria-label="Images">
    <form onSubmit=${(/** @type {Event} */ e) => (e.preventDefault(), start())}>
      <label>What the picture shows<textarea rows="3" value=${values.value.prompt ?? ""} onInput=${read("prompt")} onKeyDown=${onKeyDown}></textarea></label>
      <div class="raw-fields">
        ${
          painters.length > 1 &&
          html`<label>Model<select value=${painter.model} onChange=${(/** @type {any} */ e) => setNamed(e.target.value)}>
            ${painters.map(({ model }) => html`<option value=${model}>${model}</option>`)}
          </select></label>`
        }
        <${Field} name="size" label="Size" type="text" placeholder=${painter.size} />
        <${Field} name="count" label="Pictures" min="1" max=${MOST_PICTURES} placeholder="1" />
        <${Field} name="seed" label="Seed" min="0" placeholder="random" />
        <${Field} name="steps" label="Steps" min="1" placeholder=${painter.num_inference_steps} />
        <${Field} name="guidance" label="Guidance" min="0" step="any" placeholder=${painter.guidance_scale} />
      </div>
      <div class="buttons">
        ${
          // Two elements: one whose type changed while it is clicked would submit the form.
          running.value
            ? html`<button key="stop" type="button" class="primary" onClick=${() => running.value?.abort()}>Stop</button>`
            : html`<button key="paint" type="submit" class="primary" disabled=${!values.value.prompt?.trim()}>Paint</button>`
        }
      </div>
    </form>
    <p class="unseen" role="status" aria-live="polite">${said()}</p>
    <div class="pictures">${pictures.value.map((one) => html`<${Shown} key=${one.id} picture=${one} />`)}</div>
  </section>`;
}

function said() {
  const open = pictures.value.filter(({ done, problem }) => !done && !problem).length;
  if (open) return open === 1 ? "1 picture is being painted." : `${open} pictures are being painted.`;
  if (!pictures.value.length) return "";
  const failed = pictures.value.filter(({ problem }) => problem).length;
  return failed ? `No picture is being painted. ${failed} stopped or failed.` : "All pictures are done.";
}

/** Takes what is written into a field. @param {string} name */
function read(name) {
  return (/** @type {any} */ event) => (values.value = { ...values.value, [name]: event.target.value });
}

/** @param {any} props */
function Field({ name, label, ...rest }) {
  return html`<label>${label}<input type="number" ...${rest} value=${values.value[name] ?? ""} onInput=${read(name)} /></label>`;
}

/** @param {{picture: Picture}} props */
function Shown({ picture }) {
  const { prompt, seed, size, url, parts, done, problem } = picture;
  return html`<figure aria-busy=${!done && !problem}>
    ${url && html`<img class="made" src=${url} alt=${done ? prompt : `Preview: ${prompt}`} />`}
    ${!done && !problem && html`<progress aria-label=${`Progress of seed ${seed}`} max=${PARTS} value=${parts}></progress>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <figcaption>
      ${prompt} <span class="quiet">${[size, `seed ${seed}`].filter(Boolean).join(" · ")}</span>
      ${done && html`${" "}<a href=${url} download=${`tokenyard-${seed}.png`}>Save</a>`}
    </figcaption>
  </figure>`;
}
