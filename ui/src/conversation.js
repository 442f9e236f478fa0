// Conversations as trees of messages: branches, edits, and the path that is shown. Pure functions; no storage, no views.

/** @import {Conversation, Message, Values} from "./types.js" */

/** @returns {string} */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(36), "");
}

/** @param {Values} [values] @returns {Conversation} */
export function newConversation(values = {}) {
  return { id: newId(), title: "", updated: Date.now(), messages: {}, order: [], chosen: {}, values };
}

/**
 * The list, newest first, with a conversation in the place of its earlier form.
 * @param {Conversation[]} list @param {Conversation} conversation @returns {Conversation[]}
 */
export function withNewest(list, conversation) {
  const others = list.filter((other) => other.id !== conversation.id);
  return [conversation, ...others].sort((a, b) => b.updated - a.updated);
}

/** @param {Conversation} conversation @param {string | null} parent @returns {Message[]} */
export function children(conversation, parent) {
  return conversation.order.map((id) => conversation.messages[id]).filter((message) => message.parent === parent);
}

/** The messages that are shown, first to last. @param {Conversation} conversation @returns {Message[]} */
export function shownPath(conversation) {
  const path = [];
  let message = conversation.messages[conversation.chosen[""]];
  while (message) {
    path.push(message);
    message = conversation.messages[conversation.chosen[message.id]];
  }
  return path;
}

/** The messages from the first to this one. @param {Conversation} conversation @param {string | null} id */
export function pathTo(conversation, id) {
  /** @type {Message[]} */
  const path = [];
  for (let at = id; at !== null; at = conversation.messages[at].parent) path.unshift(conversation.messages[at]);
  return path;
}

/**
 * Adds a message and shows it. The first words of a conversation become its title.
 * @param {Conversation} conversation @param {Message} message @returns {Conversation}
 */
export function withMessage(conversation, message) {
  return {
    ...conversation,
    title: conversation.title || message.content.trim().replace(/\s+/g, " ").slice(0, 60),
    updated: Date.now(),
    messages: { ...conversation.messages, [message.id]: message },
    order: [...conversation.order, message.id],
    chosen: { ...conversation.chosen, [message.parent ?? ""]: message.id },
  };
}

/** Replaces messages by newer forms of them. @param {Conversation} conversation @param {Message[]} messages */
export function updated(conversation, messages) {
  const known = messages.filter((message) => message.id in conversation.messages);
  const changed = Object.fromEntries(known.map((message) => [message.id, message]));
  return { ...conversation, updated: Date.now(), messages: { ...conversation.messages, ...changed } };
}

/** Shows another branch. @param {Conversation} conversation @param {Message} message @returns {Conversation} */
export function choose(conversation, message) {
  return { ...conversation, chosen: { ...conversation.chosen, [message.parent ?? ""]: message.id } };
}

/** The branches beside a message, itself included. @param {Conversation} conversation @param {Message} message */
export function siblings(conversation, message) {
  return children(conversation, message.parent);
}

/** Removes a message with all that follows it. @param {Conversation} conversation @param {Message} message */
export function without(conversation, message) {
  const gone = new Set([message.id]);
  for (const id of conversation.order) if (gone.has(conversation.messages[id].parent ?? "")) gone.add(id);
  const order = conversation.order.filter((id) => !gone.has(id));
  const messages = Object.fromEntries(order.map((id) => [id, conversation.messages[id]]));
  const chosen = Object.fromEntries(Object.entries(conversation.chosen).filter(([, child]) => !gone.has(child)));
  const left = { ...conversation, updated: Date.now(), messages, order, chosen };
  const beside = children(left, message.parent);
  return beside.length && !chosen[message.parent ?? ""] ? choose(left, beside[beside.length - 1]) : left;
}

/** A new conversation of the messages up to this one. @param {Conversation} conversation @param {Message} message */
export function fork(conversation, message) {
  const copy = newConversation(conversation.values);
  return pathTo(conversation, message.id).reduce(withMessage, { ...copy, title: `${conversation.title} (fork)` });
}

/**
 * The messages of a request, in the form of the chat route.
 * @param {Message[]} path @param {string} system @returns {object[]}
 */
export function asRequest(path, system) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...path.map(oneAsRequest)];
}

/** @param {Message} message */
function oneAsRequest(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.images?.length) {
    const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: message.role, content: [...images, { type: "text", text: message.content }] };
  }
  if (!message.calls?.length) return { role: message.role, content: message.content };
  const calls = message.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role: message.role, content: message.content || null, tool_calls: calls };
}

/** Checks a conversation that a file brings. @param {any} value @returns {value is Conversation} */
export function isConversation(value) {
  const whole =
    value && typeof value.id === "string" && Array.isArray(value.order) && value.messages && value.chosen && value.values;
  const roles = ["user", "assistant", "tool"];
  return Boolean(
    whole &&
      value.order.every((/** @type {any} */ id) => {
        const message = value.messages[id];
        return message && typeof message.content === "string" && roles.includes(message.role) && message.id === id;
      }),
  );
}
