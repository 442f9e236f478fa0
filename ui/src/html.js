// Templates for the views: `html` makes preact elements of tagged templates, so that no compiler is needed.

import htm from "htm";
import { h } from "preact";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);
