// One column of the chat: a conversation and the answers that are being streamed into it. No views.

import { signal } from "@preact/signals";
import { endStream, stream } from "./api.js";
import * as tree from "./conversation.js";
import { fieldsOf } from "./parameters.js";
import * as storage from "./storage.js";

/** @import {Conversation, Message, Values} from "./types.js" */

const PATH = "/v1/chat/completions";
const SAVE_EVERY = 1000;

/** @typedef {{controller: AbortController, body: object, requestId: string, lastId: string}} Run */

export class Thread {
  constructor() {
    this.conversation = signal(tree.newConversation());
    /** The number of answers under way, as a signal. */
    this.running = signal(0);
    /** A sentence for readers of the screen. */
    this.said = signal("");
    /** Called after a conversation was stored. @param {Conversation} _conversation */
    this.onStored = (_conversation) => {};
    /** @type {Set<Run>} */
    this._runs = new Set();
    this._saved = -Infinity;
  }

  /** Shows a conversation; what was being streamed into it when the page was left goes on. @param {Conversation} given */
  open(given) {
    this.stop();
    this.conversation.value = given;
    for (const message of Object.values(given.messages)) if (message.pending) void this._takeUp(message);
  }

  /** @param {Partial<Conversation>} change */
  change(change) {
    this.conversation.value = { ...this.conversation.value, ...change };
    if (this.conversation.value.order.length) void this.store();
  }

  /** @param {Values} values */
  setValues(values) {
    this.change({ values });
  }

  async store() {
    this._saved = performance.now();
    const conversation = this.conversation.value;
    await storage.keep(conversation);
    this.onStored(conversation);
  }

  /**
   * Adds a message of the user, or the result of a tool, after the last one that is shown.
   * @param {Pick<Message, "role" | "content"> & Partial<Message>} given @param {string | null} [parent]
   */
  add(given, parent) {
    const after = parent === undefined ? (tree.shownPath(this.conversation.value).at(-1)?.id ?? null) : parent;
    const message = { id: tree.newId(), parent: after, ...given };
    this.conversation.value = tree.withMessage(this.conversation.value, message);
    return message;
  }

  /** Has the last shown message answered. @param {Values} [also] values for this request only */
  async answer(also) {
    await this.answerTo(tree.shownPath(this.conversation.value).at(-1)?.id ?? null, "", also);
  }

  /**
   * Streams an answer to a message, as a new branch below it. `prefill` is how the answer begins.
   * @param {string | null} parent @param {string} [prefill] @param {Values} [also]
   */
  async answerTo(parent, prefill = "", also = {}) {
    const values = { ...this.conversation.value.values, ...also };
    const requestId = `ui-${crypto.randomUUID?.() ?? tree.newId()}`;
    const count = prefill ? 1 : (values.n ?? 1);
    /** @type {Message[]} */
    const answers = [];
    for (let i = 0; i < count; i++) {
      const role = /** @type {const} */ ("assistant");
      const figures = { requestId };
      answers.push(this.add({ role, content: prefill, prefill, values, figures, running: true }, parent));
    }
    if (count > 1) this.conversation.value = tree.choose(this.conversation.value, answers[0]);
    await this._run(answers, requestId, "");
  }

  /** The body of the request that this answer came from. @param {Message} answer */
  bodyOf(answer) {
    const values = answer.values ?? {};
    const messages = tree.asRequest(tree.pathTo(this.conversation.value, answer.parent), values.system ?? "");
    const fields = fieldsOf(values);
    if (answer.prefill) {
      messages.push({ role: "assistant", content: answer.prefill });
      Object.assign(fields, { continue_final_message: true, add_generation_prompt: false, n: undefined });
    }
    return { messages, ...fields, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  }

  /** Ends all answers under way; what has come stays. */
  stop() {
    for (const run of this._runs) {
      run.controller.abort();
      void endStream(PATH, run.body, run.requestId, run.lastId);
    }
  }

  /** @param {Message} message */
  async _takeUp(message) {
    const { requestId, lastId } = /** @type {import("./types.js").Pending} */ (message.pending);
    await this._run([{ ...message, running: true }], requestId, lastId);
  }

  /** @param {Message[]} answers @param {string} requestId @param {string} lastId */
  async _run(answers, requestId, lastId) {
    const run = { controller: new AbortController(), body: this.bodyOf(answers[0]), requestId, lastId };
    const own = this.conversation.value.id;
    const reading = new Reading(answers, () => run.lastId);
    const show = () => {
      if (this.conversation.value.id !== own) return;
      this.conversation.value = tree.updated(this.conversation.value, reading.messages());
      if (performance.now() - this._saved > SAVE_EVERY) void this.store();
    };
    this._runs.add(run);
    this.running.value += 1;
    this.said.value = "The model answers.";
    const frames = new Frames(show);
    let problem = "";
    try {
      const options = {
        signal: run.controller.signal,
        requestId,
        lastId,
        onReconnect: () => reading.reconnected(),
      };
      for await (const event of stream(PATH, run.body, options)) {
        reading.read(event.value);
        run.lastId = event.id;
        frames.request();
      }
    } catch (error) {
      if (!run.controller.signal.aborted) problem = /** @type {Error} */ (error).message;
    }
    frames.end();
    reading.end(problem, run.controller.signal.aborted);
    this._runs.delete(run);
    this.running.value -= 1;
    this.said.value = problem ? `The answer failed: ${problem}` : "The answer is complete.";
    this._saved = -Infinity;
    show();
  }
}

/** Calls a function at most once for each frame; in a hidden tab ten times a second. */
class Frames {
  /** @param {() => void} show */
  constructor(show) {
    this._show = show;
    this._wanted = false;
    this._ended = false;
  }

  request() {
    if (this._wanted) return;
    this._wanted = true;
    const draw = () => {
      if (!this._wanted || this._ended) return;
      this._wanted = false;
      this._show();
    };
    if (document.hidden) setTimeout(draw, 100);
    else requestAnimationFrame(draw);
  }

  end() {
    this._ended = true;
  }
}

/** Puts the chunks of one stream together into messages. */
class Reading {
  /** @param {Message[]} answers @param {() => string} lastId */
  constructor(answers, lastId) {
    this._answers = answers.map((answer) => ({ ...answer, figures: { requestId: "", ...answer.figures } }));
    this._lastId = lastId;
    this._start = performance.now();
    /** @type {number | undefined} */
    this._firstText = undefined;
  }

  /** Fresh copies, so that views see what has changed. @returns {Message[]} */
  messages() {
    return this._answers.map((answer) => ({ ...answer, figures: { ...answer.figures } }));
  }

  reconnected() {
    for (const { figures } of this._answers) figures.reconnected = (figures.reconnected ?? 0) + 1;
  }

  /** @param {any} chunk */
  read(chunk) {
    const now = performance.now() - this._start;
    for (const choice of chunk.choices ?? []) this._readChoice(choice, now);
    if (!chunk.usage) return;
    for (const { figures } of this._answers) {
      figures.total = now;
      figures.promptTokens = chunk.usage.prompt_tokens;
      figures.completionTokens = chunk.usage.completion_tokens;
      figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens;
      figures.reasoningTokens = chunk.usage.completion_tokens_details?.reasoning_tokens;
    }
  }

  /** @param {any} choice @param {number} now */
  _readChoice(choice, now) {
    const answer = this._answers[choice.index];
    if (!answer) return;
    const { delta, figures } = { delta: choice.delta ?? {}, figures: answer.figures };
    const reasoning = delta.reasoning_content ?? "";
    if (reasoning || delta.content || delta.tool_calls) figures.firstToken ??= now;
    if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
    if (answer.reasoning && !reasoning && delta.content) figures.thinking ??= now - (figures.firstToken ?? now);
    if (delta.content) answer.content += delta.content;
    for (const call of delta.tool_calls ?? []) addCall(answer, call);
    if (choice.logprobs?.content?.length) {
      answer.tokens = [...(answer.tokens ?? []), ...choice.logprobs.content.map(tokenOf)];
    }
    if (choice.finish_reason) figures.finish = choice.finish_reason;
    answer.pending = { requestId: figures.requestId, lastId: this._lastId() };
  }

  /** @param {string} problem @param {boolean} stopped */
  end(problem, stopped) {
    for (const answer of this._answers) {
      answer.running = false;
      delete answer.pending;
      if (problem) answer.error = problem;
      if (stopped && !answer.figures.finish) answer.figures.finish = "stopped here";
    }
  }
}

/** @param {Message} answer @param {any} delta */
function addCall(answer, delta) {
  const calls = (answer.calls ??= []);
  const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
  calls[delta.index] = {
    id: delta.id ?? call.id,
    name: call.name + (delta.function?.name ?? ""),
    arguments: call.arguments + (delta.function?.arguments ?? ""),
  };
}

/** @param {any} given @returns {import("./types.js").Token} */
function tokenOf(given) {
  return { ...candidateOf(given), top: (given.top_logprobs ?? []).map(candidateOf) };
}

/** @param {any} given @returns {import("./types.js").Candidate} */
function candidateOf(given) {
  return { text: given.token, logprob: given.logprob, bytes: given.bytes ?? null };
}
