// The server as the page sees it: the key, JSON routes, and streams that survive a lost connection. No views.

import { signal } from "@preact/signals";

const KEY = "tokenyard-key";
// Waits between attempts to take a stream up again; a replica that died is back within seconds.
const WAITS = [200, 400, 800, 1600, 3000, 5000, 5000, 5000];

/** True once the server has asked for a key that it did not get. */
export const keyWanted = signal(false);

/** @returns {string} */
export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keeps a key until the tab is closed. @param {string} value */
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  keyWanted.value = false;
}

/** An answer of the server that is an error. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @returns {Record<string, string>} */
function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

/**
 * Asks a route for JSON; with a body it is posted. Raises ServerError.
 * @param {string} path @param {object} [body] @returns {Promise<any>}
 */
export async function ask(path, body) {
  const posted = body && { method: "POST", body: JSON.stringify(body) };
  /** @type {Record<string, string>} */
  const type = body ? { "content-type": "application/json" } : {};
  const response = await fetch(path, { ...posted, headers: { ...headers(), ...type }, cache: "no-store" });
  if (!response.ok) throw await failure(response);
  const text = await response.text();
  return text.startsWith("{") || text.startsWith("[") ? JSON.parse(text) : text;
}

/**
 * Posts what is no JSON, or is answered by none. Raises ServerError.
 * @param {string} path @param {string | FormData} body @param {string} [type] @returns {Promise<Response>}
 */
export async function send(path, body, type) {
  /** @type {Record<string, string>} */
  const named = type ? { "content-type": type } : {};
  const response = await fetch(path, { method: "POST", body, headers: { ...headers(), ...named } });
  if (!response.ok) throw await failure(response);
  return response;
}

/** @param {Response} response @returns {Promise<ServerError>} */
async function failure(response) {
  const text = await response.text();
  if (response.status === 401) keyWanted.value = true;
  try {
    const value = JSON.parse(text);
    const error = value.error?.message ?? value.message ?? value.error ?? text;
    return new ServerError(response.status, typeof error === "string" ? error : text);
  } catch {
    return new ServerError(response.status, text || `the server answered with status ${response.status}`);
  }
}

/**
 * @typedef {object} StreamOptions
 * @property {AbortSignal} signal
 * @property {string} requestId
 * @property {string} [lastId] The last event that the page has; a stream of an earlier visit is taken up after it.
 * @property {() => void} [onReconnect] Called when a broken stream goes on.
 */

/**
 * Posts a body and yields the events of the answer, over broken connections. Raises ServerError.
 * @param {string} path @param {object} body @param {StreamOptions} options
 * @returns {AsyncGenerator<{id: string, value: any}>}
 */
export async function* stream(path, body, options) {
  let lastId = options.lastId ?? "";
  let attempt = 0;
  let broken = false;
  for (;;) {
    try {
      const response = await post(path, body, options.requestId, "true", lastId, options.signal);
      if (!response.ok) throw await failure(response);
      if (broken) options.onReconnect?.();
      broken = false;
      for await (const event of eventsOf(response)) {
        attempt = 0;
        if (event.data === "[DONE]") return;
        const value = JSON.parse(event.data);
        if (value.error) throw new ServerError(value.error.code ?? 500, value.error.message ?? String(value.error));
        lastId = event.id || lastId;
        yield { id: lastId, value };
      }
    } catch (error) {
      const final = error instanceof ServerError && (error.status < 500 || !broken);
      if (options.signal.aborted || final || attempt >= WAITS.length) throw error;
    }
    // A connection that ends well and says nothing is broken, too.
    if (attempt >= WAITS.length) throw new ServerError(502, `the answer broke off ${attempt + 1} times before its end`);
    broken = true;
    await pause(WAITS[attempt], options.signal);
    attempt += 1;
  }
}

/**
 * Ends an answer that its stream would otherwise leave running for a while.
 * @param {string} path @param {object} body @param {string} requestId @param {string} lastId
 */
export async function endStream(path, body, requestId, lastId) {
  const ending = new AbortController();
  const late = setTimeout(() => ending.abort(), 5000);
  try {
    await post(path, body, requestId, "end", lastId, ending.signal);
  } catch {
    // The answer has ended, or the server is gone: nothing is left to end.
  } finally {
    clearTimeout(late);
    ending.abort();
  }
}

/**
 * @param {string} path @param {object} body @param {string} requestId @param {string} resume @param {string} lastId
 * @param {AbortSignal} signal
 */
function post(path, body, requestId, resume, lastId, signal) {
  /** @type {Record<string, string>} */
  const position = lastId ? { "last-event-id": lastId } : {};
  return fetch(path, {
    method: "POST",
    body: JSON.stringify(body),
    signal,
    headers: {
      ...headers(),
      ...position,
      "content-type": "application/json",
      "x-request-id": requestId,
      "x-resume-stream": resume,
    },
  });
}

/** @param {Response} response @returns {AsyncGenerator<{id: string, data: string}>} */
async function* eventsOf(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop() ?? "";
    for (const part of parts) {
      const fields = part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1)]);
      const of = (/** @type {string} */ name) =>
        fields.filter(([found]) => found === name).map(([, given]) => given.trimStart());
      if (of("data").length) yield { id: of("id")[0] ?? "", data: of("data").join("\n") };
    }
  }
}

/** @param {number} milliseconds @param {AbortSignal} signal */
function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
