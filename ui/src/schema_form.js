// A form of the properties of a JSON schema: adds, renames and removes them, for people who do not write schemas by hand.

import { html } from "./html.js";

const TYPES = ["string", "number", "integer", "boolean", "array", "object"];

/** @param {string} text @returns {any} the schema, if it is an object's with plain properties */
function read(text) {
  try {
    const schema = text.trim() ? JSON.parse(text) : { type: "object", properties: {}, required: [] };
    const plain = schema.type === "object" && Object.values(schema.properties ?? {}).every((one) => one && typeof one === "object");
    return plain ? schema : null;
  } catch {
    return null;
  }
}

/** @param {{text: string, onChange: (text: string) => void}} props */
export function SchemaForm({ text, onChange }) {
  const schema = read(text);
  if (!schema) return null;
  const entries = /** @type {[string, any][]} */ (Object.entries(schema.properties ?? {}));
  /** @param {[string, any][]} next */
  const write = (next) => {
    const properties = Object.fromEntries(next);
    const whole = { ...schema, properties, required: Object.keys(properties), additionalProperties: false };
    onChange(JSON.stringify(whole, null, 2));
  };
  /** @param {number} at @param {[string, any]} entry */
  const replace = (at, entry) => write(entries.map((old, i) => (i === at ? entry : old)));
  return html`<div class="schema-form" role="group" aria-label="Properties of the schema">
    ${entries.map(
      ([name, property], i) =>
        html`<div class="row">
          <input
            aria-label="Name"
            value=${name}
            onChange=${(/** @type {any} */ e) => replace(i, [e.target.value, property])}
          />
          <select
            aria-label="Type"
            value=${property.type ?? "string"}
            onChange=${(/** @type {any} */ e) => replace(i, [name, { ...property, type: e.target.value }])}
          >
            ${TYPES.map((type) => html`<option value=${type}>${type}</option>`)}
          </select>
          <button type="button" aria-label=${`Remove ${name}`} onClick=${() => write(entries.filter((_, j) => j !== i))}>✕</button>
        </div>`,
    )}
    <button type="button" onClick=${() => write([...entries, [`field${entries.length + 1}`, { type: "string" }]])}>
      Add a property
    </button>
  </div>`;
}
