// The page: its header, its views, and the key.

import { signal } from "@preact/signals";
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { key, keyWanted, setKey } from "./api.js";
import { Chat, start } from "./chat.js";
import { facts, problem, refresh } from "./facts.js";
import { html } from "./html.js";
import { Requests } from "./requests.js";

/** @type {[string, string][]} */
const VIEWS = [
  ["chat", "Chat"],
  ["images", "Images"],
  ["raw", "Raw"],
  ["live", "Live"],
  ["requests", "Requests"],
];

const place = signal(location.hash.slice(1));
addEventListener("hashchange", () => (place.value = location.hash.slice(1)));

/** The views of this server: pictures are painted only where a model does. */
const offered = () => VIEWS.filter(([name]) => name !== "images" || facts.value?.paints?.length);

function App() {
  const [view, ...rest] = (place.value || (facts.value?.task === "paint" ? "images" : "chat")).split("/");
  useEffect(() => void refresh(), []);
  return html`<header class="top">
      <h1>tokenyard</h1>
      <nav aria-label="Views">
        ${offered().map(([name, label]) => html`<a href=${`#${name}`} aria-current=${name === view ? "page" : undefined}>${label}</a>`)}
        <a href="/docs">API</a>
      </nav>
      <span class="model" title=${problem.value}>${facts.value?.model ?? ""}</span>
      <${Key} />
    </header>
    <main><${views[view] ?? Chat} place=${decodeURIComponent(rest.join("/"))} /></main>`;
}

/** @type {Record<string, any>} */
const views = {
  chat: Chat,
  images: loaded(async () => (await import("./images.js")).Images),
  raw: loaded(async () => (await import("./raw.js")).Raw),
  live: loaded(async () => (await import("./live.js")).Live),
  requests: Requests,
};

/** A view that is fetched when it is opened first. @param {() => Promise<any>} load */
function loaded(load) {
  const view = signal(/** @type {any} */ (null));
  return (/** @type {any} */ props) => {
    useEffect(() => {
      if (!view.value) void load().then((found) => (view.value = found));
    }, []);
    return view.value && html`<${view.value} ...${props} />`;
  };
}

function Key() {
  const [open, setOpen] = useState(false);
  const [text, setText] = useState(key());
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    setKey(text.trim());
    setOpen(false);
    void refresh();
  };
  if (!open && !keyWanted.value) return html`<button type="button" onClick=${() => setOpen(true)}>Key</button>`;
  return html`<form class="key" onSubmit=${save}>
    <label
      >${keyWanted.value ? "This server wants a key" : "Key"}<input
        type="password"
        autocomplete="off"
        value=${text}
        onInput=${(/** @type {any} */ e) => setText(e.target.value)}
    /></label>
    <button type="submit">Keep until this tab closes</button>
  </form>`;
}

void start();
render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("page")));
