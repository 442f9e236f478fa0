// The map of log-probabilities: an answer's tokens coloured by probability, and continuing from another token.

import { useState } from "preact/hooks";
import { html } from "./html.js";

/** @import {Candidate, Message, Token} from "./types.js" */

const BOUNDS = [0.9, 0.7, 0.4, 0.15, 0.03];

/** Class of a token's colour, p0 (certain) to p5 (unlikely). @param {number} logprob */
export function colourOf(logprob) {
  const probability = Math.exp(logprob);
  const step = BOUNDS.findIndex((bound) => probability >= bound);
  return `p${step < 0 ? BOUNDS.length : step}`;
}

/** @param {number} logprob */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 10 ? `${value.toFixed(0)} %` : value >= 0.01 ? `${value.toPrecision(2)} %` : "< 0.01 %";
}

/** The text of tokens, also where a character is cut into several. @param {Candidate[]} tokens @returns {string} */
export function textOf(tokens) {
  if (tokens.some((token) => token.bytes === null)) return tokens.map((token) => token.text).join("");
  return new TextDecoder().decode(Uint8Array.from(tokens.flatMap((token) => token.bytes ?? [])));
}

/**
 * How an answer begins that has `other` at this place; null inside reasoning, which cannot be given as a beginning.
 * @param {Message} message @param {number} index @param {Candidate} other @returns {string | null}
 */
export function beginning(message, index, other) {
  const tokens = /** @type {Token[]} */ (message.tokens);
  const own = message.content.slice((message.prefill ?? "").length);
  const before = textOf([...tokens.slice(0, index), other]);
  const start = message.reasoning ? textOf(tokens).lastIndexOf(own.trimEnd()) : 0;
  if (start < 0 || textOf(tokens.slice(0, index)).length < start) return null;
  return (message.prefill ?? "") + before.slice(start);
}

/** @param {{message: Message, onContinue: (text: string) => void}} props */
export function TokenMap({ message, onContinue }) {
  const [chosen, choose] = useState(-1);
  const tokens = message.tokens ?? [];
  const token = tokens[chosen];
  /** @param {KeyboardEvent} event */
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, chosen + step));
    choose(next);
    const buttons = /** @type {HTMLElement} */ (event.currentTarget).querySelectorAll("button");
    buttons[next].focus();
  };
  return html`<div class="token-map">
    <div class="tokens" role="group" aria-label="Tokens by probability" onKeyDown=${move}>
      ${tokens.map(
        (each, i) =>
          html`<button
            type="button"
            class=${`token ${colourOf(each.logprob)}`}
            tabindex=${i === Math.max(chosen, 0) ? 0 : -1}
            aria-pressed=${i === chosen}
            title=${alternatives(each)}
            onClick=${() => choose(i === chosen ? -1 : i)}
          >
            ${visible(each.text)}
          </button>`,
      )}
    </div>
    ${token && html`<${Alternatives} message=${message} index=${chosen} onContinue=${onContinue} />`}
  </div>`;
}

/** @param {{message: Message, index: number, onContinue: (text: string) => void}} props */
function Alternatives({ message, index, onContinue }) {
  const token = /** @type {Token[]} */ (message.tokens)[index];
  return html`<div class="alternatives" role="group" aria-label="Alternatives">
    <span>Token ${index + 1}: <code>${visible(token.text)}</code> ${percent(token.logprob)}. Continue from:</span>
    ${token.top.map((other) => {
      const text = beginning(message, index, other);
      return html`<button
        type="button"
        class=${`alternative ${colourOf(other.logprob)}`}
        disabled=${!text?.trim()}
        onClick=${() => text && onContinue(text)}
      >
        <code>${visible(other.text)}</code> ${percent(other.logprob)}
      </button>`;
    })}
  </div>`;
}

/** @param {Token} token */
function alternatives(token) {
  const others = token.top.map((other) => `${visible(other.text)}  ${percent(other.logprob)}`);
  return [`${visible(token.text)}  ${percent(token.logprob)}`, "", ...others].join("\n");
}

/** @param {string} text */
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";
}
