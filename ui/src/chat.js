// The view Chat: the list of conversations, one column or two, and the panels of parameters.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Composer } from "./composer.js";
import * as tree from "./conversation.js";
import { Difference } from "./difference.js";
import { html } from "./html.js";
import { MessageView } from "./message.js";
import { Panel } from "./panel.js";
import { problemOf } from "./parameters.js";
import * as storage from "./storage.js";
import { Thread } from "./thread.js";

/** @import {Conversation, Message} from "./types.js" */

const first = new Thread();
const second = new Thread();
const kept = signal(/** @type {Conversation[]} */ ([]));
const comparing = signal(false);
const marking = signal(false);
const panelOpen = signal(matchMedia("(min-width: 70rem)").matches);
const listOpen = signal(matchMedia("(min-width: 50rem)").matches);
const noticed = signal("");

const load = async () => (kept.value = await storage.conversations());
// Reading all conversations with their images takes long, and an answer under way is stored each second.
for (const thread of [first, second]) thread.onStored = (stored) => (kept.value = tree.withNewest(kept.value, stored));

/** Shows the conversation that was used last, unless a new one has begun meanwhile. */
export async function start() {
  await load();
  const last = kept.value[0];
  if (last && !first.conversation.value.order.length) first.open(last);
}

const columns = () => (comparing.value ? [first, second] : [first]);
const busy = () => columns().some((thread) => thread.running.value > 0);

/** @param {string} text @param {string[]} images */
function send(text, images) {
  // Columns that differ in their parameters only are compared with the same random draws.
  const seed = Math.floor(Math.random() * 2 ** 31);
  const also = comparing.value && columns().every((thread) => thread.conversation.value.values.seed === undefined) ? { seed } : {};
  for (const thread of columns()) {
    thread.add({ role: "user", content: text, ...(images.length ? { images } : {}) });
    void thread.answer(also);
  }
}

function stop() {
  for (const thread of columns()) thread.stop();
}

function fresh() {
  for (const thread of columns()) thread.open(tree.newConversation(thread.conversation.value.values));
}

function compare() {
  comparing.value = !comparing.value;
  if (!comparing.value) return;
  const { conversation } = first;
  second.open({ ...structuredClone(conversation.value), id: tree.newId(), title: conversation.value.title && `${conversation.value.title} (B)` });
}

/** @param {Conversation} conversation */
async function remove(conversation) {
  await storage.forget(conversation.id);
  if (first.conversation.value.id === conversation.id) first.open(tree.newConversation(conversation.values));
  await load();
}

/** @param {FileList} files */
async function take(files) {
  try {
    for (const file of files) {
      const value = JSON.parse(await file.text());
      const found = [value.conversations ?? value].flat();
      if (!found.every(tree.isConversation)) throw new Error("it has no conversations of this page");
      for (const conversation of found) await storage.keep(conversation);
      noticed.value = `${found.length} conversations came from ${file.name}.`;
    }
  } catch (error) {
    noticed.value = `The file cannot be read: ${/** @type {Error} */ (error).message}`;
  }
  await load();
}

export function Chat() {
  const classes = `chat${listOpen.value ? " with-list" : ""}${panelOpen.value ? " with-panel" : ""}`;
  return html`<div class=${classes}>
    ${listOpen.value && html`<${List} />`}
    <div class="middle">
      <div class="toolbar" role="toolbar" aria-label="Conversation">
        <button type="button" aria-pressed=${listOpen.value} onClick=${() => (listOpen.value = !listOpen.value)}>Conversations</button>
        <button type="button" disabled=${busy()} onClick=${fresh}>New</button>
        <button type="button" aria-pressed=${comparing.value} disabled=${busy()} onClick=${compare}>Compare</button>
        ${
          comparing.value &&
          html`<button type="button" aria-pressed=${marking.value} onClick=${() => (marking.value = !marking.value)}>Differences</button>`
        }
        <button type="button" aria-pressed=${panelOpen.value} onClick=${() => (panelOpen.value = !panelOpen.value)}>Parameters</button>
      </div>
      <div class=${comparing.value ? "columns two" : "columns"}>
        ${columns().map((thread, i) => html`<${Column} key=${i} thread=${thread} index=${i} />`)}
      </div>
      <${Composer}
        running=${busy()}
        problem=${columns().map((thread) => problemOf(thread.conversation.value.values)).find(Boolean) ?? ""}
        onSend=${send}
        onStop=${stop}
        onEditLast=${editLast}
      />
    </div>
    ${
      panelOpen.value &&
      html`<div class="panels">
        ${columns().map(
          (thread, i) =>
            html`<${Panel}
              key=${i}
              label=${comparing.value ? `Parameters ${"AB"[i]}` : "Parameters"}
              values=${thread.conversation.value.values}
              onChange=${(/** @type {any} */ values) => thread.setValues(values)}
            />`,
        )}
      </div>`
    }
  </div>`;
}

/** Opens the editor of the last message of the user. */
function editLast() {
  const own = document.querySelectorAll(".column:first-child .message.user");
  const buttons = own[own.length - 1]?.querySelectorAll("button") ?? [];
  [...buttons].find((button) => button.textContent === "Edit")?.click();
}

/** @param {{thread: Thread, index: number}} props */
function Column({ thread, index }) {
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const atEnd = useRef(true);
  const conversation = thread.conversation.value;
  const path = tree.shownPath(conversation);
  const running = thread.running.value > 0;
  useEffect(() => {
    const element = scroller.current;
    if (element && atEnd.current) element.scrollTop = element.scrollHeight;
  }, [conversation]);
  const onScroll = (/** @type {any} */ { currentTarget: box }) =>
    (atEnd.current = box.scrollHeight - box.scrollTop - box.clientHeight < 40);
  const name = comparing.value ? `Column ${"AB"[index]}` : "Messages";
  return html`<section class="column" aria-label=${name} tabindex="0" ref=${scroller} onScroll=${onScroll}>
    ${comparing.value && html`<h2>${"AB"[index]}</h2>`}
    ${path.length === 0 && html`<p class="empty">Nothing is sent anywhere but to this server. Conversations stay in this browser.</p>`}
    ${path.map(
      (message, i) =>
        html`<${MessageView}
          key=${message.id}
          thread=${thread}
          message=${message}
          branches=${tree.siblings(conversation, message)}
          busy=${running}
          last=${i === path.length - 1}
          onFork=${forked}
        />`,
    )}
    ${comparing.value && marking.value && html`<${Marked} index=${index} />`}
    <p class="unseen" role="status" aria-live="polite">${thread.said.value}</p>
  </section>`;
}

/** @param {Conversation} conversation */
function forked(conversation) {
  first.open(conversation);
  void first.store();
}

/** @param {{index: number}} props */
function Marked({ index }) {
  const last = [first, second].map((thread) => {
    const answers = tree.shownPath(thread.conversation.value).filter((message) => message.role === "assistant");
    return answers.at(-1)?.content ?? "";
  });
  return html`<${Difference} text=${last[index]} other=${last[1 - index]} label=${`Differences in ${"AB"[index]}`} />`;
}

function List() {
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const save = () =>
    storage.download("tokenyard-conversations.json", JSON.stringify({ version: 1, conversations: kept.value }, null, 1));
  return html`<nav class="list" aria-label="Conversations">
    <div class="buttons">
      <button type="button" disabled=${!kept.value.length} onClick=${save}>Export</button>
      <button type="button" onClick=${() => chooser.current?.click()}>Import</button>
      <input ref=${chooser} type="file" hidden multiple accept="application/json,.json" aria-label="Files of conversations"
        onChange=${(/** @type {any} */ e) => void take(e.target.files).then(() => (e.target.value = ""))} />
    </div>
    <p role="status">${noticed.value}</p>
    <ul>
      ${kept.value.map(
        (conversation) =>
          html`<li key=${conversation.id}>
            <button
              type="button"
              class="title"
              aria-current=${conversation.id === first.conversation.value.id}
              onClick=${() => first.open(conversation)}
            >
              ${conversation.title || "Untitled"}
            </button>
            <button type="button" aria-label=${`Delete ${conversation.title || "Untitled"}`} onClick=${() => void remove(conversation)}>✕</button>
          </li>`,
      )}
    </ul>
  </nav>`;
}
