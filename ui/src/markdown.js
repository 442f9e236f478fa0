// Markdown of models as safe HTML: raw HTML is shown as text, images as links, code is highlighted. Formulas are marked;
// `math.js` draws them.

import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import css from "highlight.js/lib/languages/css";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { Marked } from "marked";

for (const [name, language] of Object.entries({
  bash,
  c,
  css,
  go,
  java,
  javascript,
  json,
  python,
  rust,
  sql,
  xml,
  yaml,
})) {
  hljs.registerLanguage(name, language);
}
// C++ and TypeScript are close enough to be coloured by the smaller grammars.
hljs.registerAliases(["cpp", "c++", "h"], { languageName: "c" });
hljs.registerAliases(["ts", "tsx", "typescript"], { languageName: "javascript" });

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);
}

/** @param {string} code @param {string} language */
function coloured(code, language) {
  return hljs.getLanguage(language) ? hljs.highlight(code, { language, ignoreIllegals: true }).value : escaped(code);
}

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const language = (lang ?? "").split(/\s/)[0].toLowerCase();
      const name = escaped(language || "text");
      const body = `<pre tabindex="0"><code>${coloured(text, language)}</code></pre>`;
      return `<div class="code"><div class="code-head"><span>${name}</span><button type="button" class="copy">Copy</button></div>${body}</div>`;
    },
  },
});

/** @param {any} token */
const formula = (token) => `<span class="math${token.display ? " display" : ""}">${escaped(token.text)}</span>`;

/** A formula at the beginning of a text. @param {string} name @param {"block" | "inline"} level @param {RegExp} rule */
function formulas(name, level, rule) {
  return {
    name,
    level,
    // Where one may begin; a block does so at the beginning of a line.
    start: (/** @type {string} */ text) => text.match(level === "block" ? /\n {0,3}(?:\$\$|\\\[)/ : /\$|\\[[(]/)?.index,
    tokenizer(/** @type {string} */ text) {
      const found = rule.exec(text);
      if (!found) return undefined;
      const [raw, dollars, brackets, round, dollar] = found;
      const display = dollars ?? brackets;
      return { type: name, raw, text: (display ?? round ?? dollar).trim(), display: display !== undefined };
    },
    renderer: (/** @type {any} */ token) => (level === "block" ? `<p>${formula(token)}</p>` : formula(token)),
  };
}

marked.use({
  extensions: [
    formulas("formulas", "block", /^ {0,3}(?:\$\$((?:[^$\\]|\\[^])+)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/),
    // A dollar before a digit ends none: it is a price.
    formulas(
      "formula",
      "inline",
      /^(?:\$\$((?:[^$\\]|\\[^])+)\$\$|\\\[([^]+?)\\\]|\\\(([^\n]+?)\\\)|\$(?=[^\s$])((?:[^$`\\\n]|\\[^\n])+)(?<=\S)\$(?!\d))/,
    ),
  ],
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

/** @param {string} unsafe @returns {any} HTML that the page's policy accepts */
function safe(unsafe) {
  return DOMPurify.sanitize(unsafe, {
    RETURN_TRUSTED_TYPE: true,
    ALLOWED_TAGS:
      "a b blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup table tbody td th thead tr ul".split(
        " ",
      ),
    ALLOWED_ATTR: ["href", "class", "type", "tabindex", "start", "align", "target", "rel"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
  });
}

/** Blocks of a text that grows at its end. Closed blocks are made once; only the open one is made again. */
export class Blocks {
  constructor() {
    this._text = "";
    this._closedUpTo = 0;
    /** @type {any[]} */
    this._closed = [];
  }

  /** @param {string} text @param {boolean} whole @returns {any[]} HTML of each block */
  of(text, whole) {
    if (whole) return [safe(/** @type {string} */ (marked.parse(text, { async: false })))];
    if (!text.startsWith(this._text)) {
      this._closed = [];
      this._closedUpTo = 0;
    }
    this._text = text;
    const tail = marked.lexer(text.slice(this._closedUpTo));
    // The last two may still change: a paragraph, or the space behind a list that goes on.
    for (const token of tail.slice(0, -2)) {
      this._closed.push(safe(marked.parser([token])));
      this._closedUpTo += token.raw.length;
    }
    const open = tail.slice(-2).map((token) => safe(marked.parser([token])));
    return [...this._closed, ...open];
  }
}
