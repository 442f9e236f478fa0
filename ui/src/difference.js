// Where two answers differ, word by word. No views but the marked text.

import { html } from "./html.js";

// Comparing takes time and memory by the square of this.
const MOST_WORDS = 1500;

/**
 * The words of `text`, and whether each is missing in the longest common subsequence with `other`.
 * @param {string} text @param {string} other @returns {{word: string, differs: boolean}[]}
 */
export function differences(text, other) {
  const mine = text.match(/\s+|\S+/g)?.slice(0, MOST_WORDS) ?? [];
  const theirs = other.match(/\s+|\S+/g)?.slice(0, MOST_WORDS) ?? [];
  const width = theirs.length + 1;
  const lengths = new Uint16Array((mine.length + 1) * width);
  for (let i = mine.length - 1; i >= 0; i--) {
    for (let j = theirs.length - 1; j >= 0; j--) {
      const below = lengths[(i + 1) * width + j];
      const beside = lengths[i * width + j + 1];
      lengths[i * width + j] = mine[i] === theirs[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(below, beside);
    }
  }
  const result = [];
  for (let i = 0, j = 0; i < mine.length; ) {
    if (j < theirs.length && mine[i] === theirs[j]) {
      result.push({ word: mine[i++], differs: false });
      j++;
    } else if (j < theirs.length && lengths[i * width + j + 1] >= lengths[(i + 1) * width + j]) j++;
    else result.push({ word: mine[i++], differs: true });
  }
  return result;
}

/** @param {{text: string, other: string, label: string}} props */
export function Difference({ text, other, label }) {
  return html`<section class="difference plain" aria-label=${label}>
    ${differences(text, other).map(({ word, differs }) => (differs && word.trim() ? html`<mark>${word}</mark>` : word))}
  </section>`;
}
