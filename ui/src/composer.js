// The box in which a message is written: text, images by drop, paste and file, send and stop.

import { useRef, useState } from "preact/hooks";
import { facts } from "./facts.js";
import { html } from "./html.js";

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/**
 * @typedef {object} Props
 * @property {boolean} running
 * @property {string} problem
 * @property {(text: string, images: string[]) => void} onSend
 * @property {() => void} onStop
 * @property {() => void} onEditLast
 */

/** @param {Props} props */
export function Composer({ running, problem, onSend, onStop, onEditLast }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState(/** @type {string[]} */ ([]));
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const sees = Boolean(facts.value?.sees);
  const ready = !running && !problem && (text.trim() || images.length);
  const send = () => {
    if (!ready) return;
    onSend(text, images);
    setText("");
    setImages([]);
  };
  /** @param {Iterable<File>} files */
  const take = async (files) => {
    if (!sees) return;
    const chosen = [...files].filter((file) => IMAGE_TYPES.includes(file.type));
    const urls = await Promise.all(chosen.map(asDataUrl));
    setImages((before) => [...before, ...urls]);
  };
  /** @param {KeyboardEvent} event */
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey || !event.shiftKey) && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && running) onStop();
    else if (event.key === "ArrowUp" && !text && !running) onEditLast();
  };
  return html`<form
    class="composer"
    onSubmit=${(/** @type {Event} */ e) => (e.preventDefault(), send())}
    onDragOver=${(/** @type {DragEvent} */ e) => e.preventDefault()}
    onDrop=${(/** @type {DragEvent} */ e) => (e.preventDefault(), void take(e.dataTransfer?.files ?? []))}
    onPaste=${(/** @type {ClipboardEvent} */ e) => void take(e.clipboardData?.files ?? [])}
  >
    ${
      images.length > 0 &&
      html`<div class="attached">
        ${images.map(
          (url, i) =>
            html`<button type="button" aria-label=${`Remove image ${i + 1}`} onClick=${() => setImages(images.filter((_, j) => j !== i))}>
              <img src=${url} alt="" />
            </button>`,
        )}
      </div>`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <textarea
      aria-label="Message"
      placeholder=${sees ? "Write a message, drop or paste an image" : "Write a message"}
      rows="3"
      value=${text}
      onInput=${(/** @type {any} */ e) => setText(e.target.value)}
      onKeyDown=${onKeyDown}
    ></textarea>
    <div class="buttons">
      ${
        sees &&
        html`<button type="button" onClick=${() => chooser.current?.click()}>Image</button>
          <input ref=${chooser} type="file" hidden multiple accept=${IMAGE_TYPES.join(",")} aria-label="Images"
            onChange=${(/** @type {any} */ e) => void take(e.target.files).then(() => (e.target.value = ""))} />`
      }
      ${
        running
          ? html`<button type="button" class="primary" onClick=${onStop}>Stop</button>`
          : html`<button type="submit" class="primary" disabled=${!ready}>Send</button>`
      }
    </div>
  </form>`;
}

/** @param {File} file @returns {Promise<string>} */
function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
