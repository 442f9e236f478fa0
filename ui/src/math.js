// Formulas as MathML, which browsers draw themselves: without fonts, styles or HTML of the library.

import katex from "katex";

/** Draws the formulas in a place. One that cannot be read stays as it was written. @param {HTMLElement} place */
export function draw(place) {
  for (const written of place.querySelectorAll(".math")) {
    const drawn = document.createElement("span");
    const displayMode = written.classList.contains("display");
    try {
      katex.render(written.textContent ?? "", drawn, { output: "mathml", displayMode, maxExpand: 200, maxSize: 20, strict: "ignore" });
    } catch {
      continue;
    }
    written.replaceWith(drawn);
  }
}
