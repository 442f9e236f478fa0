// The panel of parameters of one column. Empty fields are the server's defaults and are not sent.

import { useEffect, useState } from "preact/hooks";
import { html } from "./html.js";
import { FORMATS, PARAMETERS, jsonProblem } from "./parameters.js";
import { facts } from "./facts.js";
import { SchemaForm } from "./schema_form.js";
import * as storage from "./storage.js";

/** @import {Preset, Values} from "./types.js" */
/** @import {Parameter} from "./parameters.js" */

/** @param {{values: Values, onChange: (values: Values) => void, label: string}} props */
export function Panel({ values, onChange, label }) {
  /** @param {string} name @param {any} value */
  const set = (name, value) => {
    const next = { ...values, [name]: value };
    if (value === "" || value === undefined || value === false) delete next[name];
    onChange(next);
  };
  return html`<section class="panel" aria-label=${label}>
    <h2>${label}</h2>
    <${Presets} values=${values} onChange=${onChange} />
    ${
      (facts.value?.models ?? []).length > 1 &&
      html`<label
        >Model<select value=${values.model ?? ""} onChange=${(/** @type {any} */ e) => set("model", e.target.value)}>
          <option value="">${facts.value.model}</option>
          ${facts.value.models.slice(1).map((/** @type {string} */ name) => html`<option value=${name}>${name}</option>`)}
        </select></label
      >`
    }
    <label
      >System message<textarea
        rows="3"
        value=${values.system ?? ""}
        onInput=${(/** @type {any} */ e) => set("system", e.target.value)}
      ></textarea>
    </label>
    <label class="switch"
      ><input
        type="checkbox"
        checked=${Boolean(values.tokenMap)}
        onChange=${(/** @type {any} */ e) => set("tokenMap", e.target.checked)}
      />
      Log-probabilities</label
    >
    <label
      >Form of the answer<select
        value=${values.format ?? ""}
        onChange=${(/** @type {any} */ e) => set("format", e.target.value)}
      >
        ${FORMATS.map(([value, name]) => html`<option value=${value}>${name}</option>`)}
      </select></label
    >
    ${
      values.format &&
      values.format !== "json_object" &&
      html`<${Text}
        name="formatText"
        label=${FORMATS.find(([value]) => value === values.format)?.[1]}
        rows=${6}
        json=${values.format === "json_schema"}
        value=${values.formatText ?? ""}
        onInput=${(/** @type {string} */ text) => set("formatText", text)}
      />`
    }
    ${
      values.format === "json_schema" &&
      html`<${SchemaForm} text=${values.formatText ?? ""} onChange=${(/** @type {string} */ text) => set("formatText", text)} />`
    }
    ${PARAMETERS.map((parameter) => html`<${Field} key=${parameter.name} parameter=${parameter} value=${values[parameter.name]} set=${set} />`)}
  </section>`;
}

/** @param {{parameter: Parameter, value: any, set: (name: string, value: any) => void}} props */
function Field({ parameter, value, set }) {
  const { name, label, kind, hint } = parameter;
  if (kind === "switch") {
    return html`<label class="switch" title=${hint}
      ><input type="checkbox" checked=${Boolean(value)} onChange=${(/** @type {any} */ e) => set(name, e.target.checked)} />
      ${label}</label
    >`;
  }
  if (kind === "choice") {
    return html`<label
      >${label}<select value=${value ?? ""} onChange=${(/** @type {any} */ e) => set(name, e.target.value)}>
        ${(parameter.choices ?? []).map(([given, text]) => html`<option value=${given}>${text}</option>`)}
      </select></label
    >`;
  }
  if (kind === "number") {
    const { min, max, step } = parameter;
    const read = (/** @type {any} */ e) => set(name, e.target.value === "" ? undefined : Number(e.target.value));
    return html`<label class="number"
      >${label}<input type="number" ...${{ min, max, step }} value=${value ?? ""} placeholder="default" onInput=${read}
    /></label>`;
  }
  const onInput = (/** @type {string} */ text) => set(name, text);
  return html`<${Text} ...${{ name, label, hint, rows: 2, json: kind === "json", value: value ?? "", onInput }} />`;
}

/** @param {{name: string, label: string, hint?: string, rows: number, json: boolean, value: string, onInput: (text: string) => void}} props */
function Text({ name, label, hint, rows, json, value, onInput }) {
  const problem = json ? jsonProblem(value) : "";
  return html`<label
      >${label}<textarea
        name=${name}
        rows=${rows}
        placeholder=${hint}
        spellcheck=${false}
        value=${value}
        aria-invalid=${Boolean(problem)}
        onInput=${(/** @type {any} */ e) => onInput(e.target.value)}
      ></textarea></label
    >${problem && html`<p class="problem" role="alert">${problem}</p>`}`;
}

/** @param {{values: Values, onChange: (values: Values) => void}} props */
function Presets({ values, onChange }) {
  const [presets, setPresets] = useState(/** @type {Preset[]} */ ([]));
  const [name, setName] = useState("");
  const load = async () => setPresets(await storage.presets());
  useEffect(() => void load(), []);
  const save = async () => {
    await storage.keepPreset({ name: name.trim(), values });
    await load();
  };
  const remove = async () => {
    await storage.forgetPreset(name.trim());
    setName("");
    await load();
  };
  const known = presets.find((preset) => preset.name === name.trim());
  return html`<div class="presets">
    <label
      >Preset<input list="presets" value=${name} placeholder="name" onInput=${(/** @type {any} */ e) => setName(e.target.value)}
    /></label>
    <datalist id="presets">${presets.map((preset) => html`<option value=${preset.name} />`)}</datalist>
    <button type="button" disabled=${!known} onClick=${() => known && onChange(known.values)}>Use</button>
    <button type="button" disabled=${!name.trim()} onClick=${save}>Save</button>
    <button type="button" disabled=${!known} onClick=${remove}>Delete</button>
    <button type="button" onClick=${() => onChange({})}>Defaults</button>
  </div>`;
}
