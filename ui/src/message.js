// One message of a conversation: its text, reasoning, calls and figures, and what can be done with it.

import { memo } from "./memo.js";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { key } from "./api.js";
import * as tree from "./conversation.js";
import { copy } from "./copying.js";
import { html } from "./html.js";
import { Blocks } from "./markdown.js";
import { asCurl, asPython } from "./parameters.js";
import { TokenMap } from "./tokens.js";

/** @import {Conversation, Figures, Message, ToolCall} from "./types.js" */
/** @import {Thread} from "./thread.js" */

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/**
 * @typedef {object} Props
 * @property {Thread} thread
 * @property {Message} message
 * @property {Message[]} branches
 * @property {boolean} busy
 * @property {boolean} last
 * @property {(conversation: Conversation) => void} onFork
 */

export const MessageView = memo(
  /** @param {Props} props */ function MessageView({ thread, message, branches, busy, last, onFork }) {
    const [editing, setEditing] = useState(false);
    const [map, setMap] = useState(false);
    const close = () => setEditing(false);
    return html`<article class=${`message ${message.role}`} aria-label=${NAMES[message.role]} aria-busy=${Boolean(message.running)}>
      <header>
        <h2>${NAMES[message.role]}</h2>
        <${Branches} thread=${thread} message=${message} branches=${branches} busy=${busy} />
      </header>
      ${message.images?.map((url, i) => html`<img class="picture" src=${url} alt=${`Image ${i + 1} of the message`} />`)}
      ${message.reasoning && html`<${Reasoning} message=${message} />`}
      ${
        editing
          ? html`<${Editor} thread=${thread} message=${message} onClose=${close} />`
          : map && message.tokens?.length
            ? html`<${TokenMap} message=${message} onContinue=${(/** @type {string} */ text) => void thread.answerTo(message.parent, text)} />`
            : html`<${Text} message=${message} />`
      }
      ${message.calls && html`<${Calls} thread=${thread} message=${message} open=${last && !busy} />`}
      ${message.error && html`<p class="problem" role="alert">${message.error}</p>`}
      ${message.figures && html`<${FiguresLine} figures=${message.figures} running=${message.running} />`}
      ${!editing && html`<${Actions} ...${{ thread, message, busy, map, setMap, onEdit: () => setEditing(true), onFork }} />`}
    </article>`;
  },
);

/** @param {{message: Message}} props */
function Text({ message }) {
  const blocks = useMemo(() => new Blocks(), [message.id]);
  if (message.role !== "assistant") return html`<div class="plain">${message.content}</div>`;
  const parts = blocks.of(message.content, !message.running);
  /** @param {MouseEvent} event */
  const onClick = (event) => {
    const button = /** @type {Element} */ (event.target).closest?.("button.copy");
    if (button) void copy(button.closest(".code")?.querySelector("pre")?.textContent ?? "", button);
  };
  return html`<div class="text" onClick=${onClick}>
    ${parts.map((part, i) => html`<${Block} key=${i} content=${part} />`)}
    ${message.running && html`<span class="cursor" aria-hidden="true"></span>`}
  </div>`;
}

/** Draws formulas by a library that is loaded for the first one. @param {HTMLElement} place */
async function drawFormulas(place) {
  (await import("./math.js")).draw(place);
}

const Block = memo(
  /** @param {{content: any}} props */ function Block({ content }) {
    const place = useRef(/** @type {HTMLElement | null} */ (null));
    useEffect(() => {
      if (place.current?.querySelector(".math")) void drawFormulas(place.current);
    }, [content]);
    return html`<div ref=${place} dangerouslySetInnerHTML=${{ __html: content }} />`;
  },
);

/** @param {{message: Message}} props */
function Reasoning({ message }) {
  const { thinking, reasoningTokens } = message.figures ?? {};
  const length = thinking === undefined ? (message.running ? "…" : "") : ` for ${seconds(thinking)}`;
  return html`<details class="reasoning">
    <summary>Reasoning${length}${reasoningTokens ? `, ${reasoningTokens} tokens` : ""}</summary>
    <div class="plain">${message.reasoning}</div>
  </details>`;
}

/** @param {{thread: Thread, message: Message, branches: Message[], busy: boolean}} props */
function Branches({ thread, message, branches, busy }) {
  if (branches.length < 2) return null;
  const at = branches.findIndex((branch) => branch.id === message.id);
  const go = (/** @type {number} */ step) => thread.change(tree.choose(thread.conversation.value, branches[at + step]));
  return html`<span class="branches">
    <button type="button" aria-label="Earlier branch" disabled=${busy || at === 0} onClick=${() => go(-1)}>‹</button>
    <span>${at + 1}/${branches.length}</span>
    <button type="button" aria-label="Later branch" disabled=${busy || at === branches.length - 1} onClick=${() => go(1)}>›</button>
  </span>`;
}

/** @param {{thread: Thread, message: Message, onClose: () => void}} props */
function Editor({ thread, message, onClose }) {
  const [text, setText] = useState(message.content);
  const save = async () => {
    onClose();
    const { role, images, callId, figures, values } = message;
    const changed = thread.add({ role, content: text, images, callId, figures: role === "assistant" ? figures : undefined, values }, message.parent);
    if (role === "assistant") await thread.store();
    else await thread.answerTo(changed.id);
  };
  /** @param {KeyboardEvent} event */
  const onKeyDown = (event) => {
    if (event.key === "Escape") onClose();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void save();
  };
  return html`<div class="editor">
    <textarea aria-label="Text of the message" rows="5" value=${text} onKeyDown=${onKeyDown} onInput=${(/** @type {any} */ e) => setText(e.target.value)}></textarea>
    <button type="button" class="primary" onClick=${save}>${message.role === "assistant" ? "Save as a branch" : "Send as a branch"}</button>
    <button type="button" onClick=${onClose}>Cancel</button>
  </div>`;
}

/** @param {{thread: Thread, message: Message, open: boolean}} props */
function Calls({ thread, message, open }) {
  const calls = /** @type {ToolCall[]} */ (message.calls);
  const [results, setResults] = useState(calls.map(() => ""));
  const send = async () => {
    let parent = message.id;
    calls.forEach((call, i) => {
      parent = thread.add({ role: "tool", content: results[i] ?? "", callId: call.id }, parent).id;
    });
    await thread.answerTo(parent);
  };
  return html`<div class="calls">
    ${calls.map(
      (call, i) =>
        html`<section class="call" aria-label=${`Call of ${call.name}`}>
          <h3>${call.name}</h3>
          <pre tabindex="0">${pretty(call.arguments)}</pre>
          ${
            open &&
            html`<label
              >Result<textarea
                rows="2"
                value=${results[i] ?? ""}
                onInput=${(/** @type {any} */ e) => setResults(calls.map((_, j) => (j === i ? e.target.value : (results[j] ?? ""))))}
              ></textarea></label
            >`
          }
        </section>`,
    )}
    ${open && html`<button type="button" class="primary" onClick=${send}>${calls.length > 1 ? "Send results" : "Send result"}</button>`}
  </div>`;
}

/** @param {string} json */
function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** @param {{figures: Figures, running?: boolean}} props */
function FiguresLine({ figures, running }) {
  const { firstToken, total, completionTokens, promptTokens, cachedTokens, finish, reconnected, requestId } = figures;
  const decoding = (total ?? 0) - (firstToken ?? 0);
  const rate = completionTokens && completionTokens > 1 && decoding > 0 ? (1000 * (completionTokens - 1)) / decoding : 0;
  const parts = [
    firstToken !== undefined && `first token ${seconds(firstToken)}`,
    rate && `${rate.toFixed(1)} tok/s`,
    promptTokens !== undefined && `${promptTokens} prompt${cachedTokens ? ` (${cachedTokens} cached)` : ""}`,
    completionTokens !== undefined && `${completionTokens} answer tokens`,
    finish,
    reconnected && `reconnected ${reconnected === 1 ? "" : `${reconnected} times`}`,
    running && firstToken === undefined && "waiting for the first token",
  ];
  return html`<p class="figures">
    ${parts.filter(Boolean).join(" · ")}${" "}
    ${requestId && html`<a href=${`#requests/${requestId}`} title=${requestId}>why</a>`}
  </p>`;
}

/** @param {number} milliseconds */
function seconds(milliseconds) {
  return milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

/** @param {any} props */
function Actions({ thread, message, busy, map, setMap, onEdit, onFork }) {
  const answer = message.role === "assistant";
  /** @param {(body: any, key: string) => string} form */
  const copyAs = (form) => (/** @type {any} */ event) => void copy(form(thread.bodyOf(message), key()), event.currentTarget);
  return html`<div class="actions">
    <button type="button" onClick=${(/** @type {any} */ event) => void copy(message.content, event.currentTarget)}>Copy</button>
    <button type="button" disabled=${busy} onClick=${onEdit}>Edit</button>
    ${
      answer &&
      html`<button type="button" disabled=${busy} onClick=${() => void thread.answerTo(message.parent)}>Regenerate</button>
        <button type="button" disabled=${busy || !message.content.trim()} onClick=${() => void thread.answerTo(message.parent, message.content)}>
          Continue
        </button>
        ${
          message.tokens?.length &&
          html`<button type="button" aria-pressed=${map} onClick=${() => setMap(!map)}>Token map</button>`
        }
        <button type="button" onClick=${copyAs(asCurl)}>As curl</button>
        <button type="button" onClick=${copyAs(asPython)}>As Python</button>`
    }
    <button type="button" disabled=${busy} onClick=${() => onFork(tree.fork(thread.conversation.value, message))}>Fork</button>
    <button type="button" disabled=${busy} onClick=${() => thread.change(tree.without(thread.conversation.value, message))}>Delete</button>
  </div>`;
}
