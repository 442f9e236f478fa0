// A component that is rendered again only when a property changes.

import { Component, h } from "preact";

/** @template P @param {(props: P) => any} render @returns {(props: P) => any} */
export function memo(render) {
  class Memo extends Component {
    /** @param {Record<string, any>} next */
    shouldComponentUpdate(next) {
      const now = /** @type {Record<string, any>} */ (this.props);
      return Object.keys({ ...now, ...next }).some((name) => !same(now[name], next[name]));
    }
    render() {
      return h(/** @type {any} */ (render), /** @type {any} */ (this.props));
    }
  }
  return /** @type {any} */ (Memo);
}

/** @param {any} a @param {any} b */
function same(a, b) {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((item, i) => item === b[i]);
  return a === b;
}
