// The parameters of a request: their kinds and limits, and the body that differs from the defaults only. No views.

/** @import {Values} from "./types.js" */

/**
 * @typedef {object} Parameter
 * @property {string} name
 * @property {string} label
 * @property {"number" | "text" | "json" | "lines" | "switch" | "choice"} kind
 * @property {string} [hint]
 * @property {number} [min]
 * @property {number} [max]
 * @property {number | "any"} [step]
 * @property {[string, string][]} [choices]
 */

/** @type {Parameter[]} */
export const PARAMETERS = [
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", kind: "number", min: 0, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", kind: "number", min: -1, step: 1 },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Longest answer", kind: "number", min: 1, step: 1 },
  { name: "seed", label: "Seed", kind: "number", step: 1 },
  { name: "n", label: "Answers", kind: "number", min: 1, max: 8, step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "stop", label: "Stop texts", kind: "lines", hint: "one a line" },
  { name: "logit_bias", label: "Logit bias", kind: "json", hint: '{"token id": -100 to 100}' },
  {
    name: "thinking",
    label: "Reasoning",
    kind: "choice",
    choices: [
      ["", "as the model does"],
      ["on", "on"],
      ["off", "off"],
    ],
  },
  { name: "tools", label: "Tools", kind: "json", hint: "a list of functions, as OpenAI's API has them" },
  { name: "deterministic", label: "Deterministic", kind: "switch", hint: "the same tokens whatever else runs" },
  { name: "priority", label: "Priority", kind: "number", min: -1000, max: 1000, step: 1 },
  { name: "timeout", label: "Deadline in seconds", kind: "number", min: 0.1, step: "any" },
  { name: "extra", label: "Further fields", kind: "json", hint: "an object that is added to the body" },
];

/** @type {[string, string][]} */
export const FORMATS = [
  ["", "text"],
  ["json_object", "JSON"],
  ["json_schema", "JSON schema"],
  ["regex", "regular expression"],
  ["grammar", "grammar (EBNF)"],
];

/** Why a JSON text cannot be used; "" when it can. @param {string} text @returns {string} */
export function jsonProblem(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return /** @type {Error} */ (error).message;
  }
}

/** The first reason why these values cannot be sent; "" when they can. @param {Values} values @returns {string} */
export function problemOf(values) {
  for (const { name, label, kind } of PARAMETERS) {
    const problem = kind === "json" && values[name] ? jsonProblem(values[name]) : "";
    if (problem) return `${label}: ${problem}`;
  }
  const problem = values.format === "json_schema" ? jsonProblem(values.formatText ?? "") : "";
  return problem ? `JSON schema: ${problem}` : "";
}

/** The fields of a body. Defaults are left out. @param {Values} values @returns {Record<string, any>} */
export function fieldsOf(values) {
  /** @type {Record<string, any>} */
  const fields = {};
  for (const { name, kind } of PARAMETERS) {
    const value = values[name];
    if (value === undefined || value === "" || value === false) continue;
    if (name === "thinking") fields.chat_template_kwargs = { enable_thinking: value === "on" };
    else if (name === "extra") Object.assign(fields, JSON.parse(value));
    else if (kind === "json") fields[name] = JSON.parse(value);
    else if (kind === "lines") fields[name] = value.split("\n").filter(Boolean);
    else fields[name] = value;
  }
  if (values.model) fields.model = values.model;
  if (values.tokenMap) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return { ...fields, ...formatOf(values) };
}

/** @param {Values} values @returns {Record<string, any>} */
function formatOf(values) {
  const text = values.formatText ?? "";
  if (values.format === "json_object") return { response_format: { type: "json_object" } };
  if (!text.trim()) return {};
  if (values.format === "json_schema") {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } };
  }
  return values.format ? { structured_outputs: { [values.format]: text } } : {};
}

/** A command that sends a body. @param {object} body @param {string} key @returns {string} */
export function asCurl(body, key) {
  const secret = key ? " -H \"Authorization: Bearer $TOKENYARD_KEY\"" : "";
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${location.origin}/v1/chat/completions${secret} -H 'Content-Type: application/json' -d '${text}'`;
}

/** Lines of Python that send a body with OpenAI's client. @param {Record<string, any>} body @param {string} key */
export function asPython(body, key) {
  const secret = key ? 'os.environ["TOKENYARD_KEY"]' : '"none"';
  return `import json
${key ? "import os\n" : ""}
from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${secret})
body = json.loads(r'''${JSON.stringify(body, null, 2).replaceAll("'''", "''\\u0027")}''')
body.setdefault("model", "default")
own = {"messages", "model", "stream", "stream_options"}
stream = client.chat.completions.create(
    **{name: body.pop(name) for name in list(body) if name in own}, extra_body=body
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}
