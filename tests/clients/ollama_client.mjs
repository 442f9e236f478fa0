// Ollama's `ollama` package against a server: node ollama_client.mjs BASE_URL MODEL PICTURE
// Prints one JSON line for each check: {"check": "NAME", "error": null or what was wrong}. test_ollama.py reads them.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [host, model, picture] = process.argv.slice(2);
const client = new Ollama({ host });
const options = { temperature: 0, num_predict: 300 };
const sum = [{ role: "user", content: "What is 17 + 25?" }];
const sumAnswer = "17 + 25 = 42.";
const weather = { role: "user", content: "What is the weather in Paris?" };
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

/** What a call is refused with. */
async function refusal(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("it was not refused");
}

const checks = {
  async list() {
    const { models } = await client.list();
    assert.ok(models.some(({ name }) => name === `${model}:latest` || name === model), JSON.stringify(models));
    assert.ok((await client.ps()).models.length >= 1);
    assert.match((await client.version()).version, /^\d+\.\d+/);
  },
  async show() {
    const { capabilities, model_info: info, template } = await client.show({ model });
    assert.ok(capabilities.includes("completion") && capabilities.includes("tools"));
    assert.ok(Object.entries(info).some(([name, value]) => name.endsWith(".context_length") && value > 100));
    assert.ok(template.length > 10);
  },
  async chat() {
    const answer = await client.chat({ model, messages: sum, options });
    assert.equal(answer.message.content, sumAnswer);
    assert.equal(answer.done_reason, "stop");
    assert.ok(answer.eval_count > 5 && answer.prompt_eval_count > 5 && answer.total_duration > 0);
  },
  async "streamed chat"() {
    const parts = [];
    for await (const part of await client.chat({ model: `${model}:latest`, messages: sum, options, stream: true })) parts.push(part);
    assert.equal(parts.map((part) => part.message.content).join(""), sumAnswer);
    assert.deepEqual(parts.map((part) => part.done), [...parts.slice(1).map(() => false), true]);
  },
  async "an ended stream"() {
    const stream = await client.chat({ model, messages: sum, options: { ...options, seed: 3 }, stream: true });
    const broken = await refusal(async () => {
      for await (const _ of stream) stream.abort();
    });
    assert.equal(broken.name, "AbortError");
  },
  async generate() {
    const answer = await client.generate({ model, prompt: sum[0].content, options });
    assert.equal(answer.response, sumAnswer);
    let text = "";
    for await (const part of await client.generate({ model, prompt: sum[0].content, options, stream: true })) text += part.response;
    assert.equal(text, sumAnswer);
  },
  async "a schema"() {
    const format = { type: "object", properties: { n: { enum: [1, 2] } }, required: ["n"], additionalProperties: false };
    const { message } = await client.chat({ model, messages: [{ role: "user", content: "A number." }], format, options });
    assert.ok([1, 2].includes(JSON.parse(message.content).n));
  },
  async "a tool loop"() {
    const { message } = await client.chat({ model, messages: [weather], tools: [tool], options });
    const calls = message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
    assert.deepEqual(calls, [["get_weather", { city: "Paris" }]]);
    const result = { role: "tool", tool_name: "get_weather", content: '{"weather": "sunny"}' };
    const last = await client.chat({ model, messages: [weather, message, result], tools: [tool], options });
    assert.match(last.message.content, /sunny/);
  },
  async thinking() {
    const { message } = await client.chat({ model, messages: sum, think: true, options: { ...options, num_predict: 1500 } });
    assert.ok(message.thinking.length > 3);
    assert.match(message.content, /42/);
  },
  async "a picture"() {
    const messages = [{ role: "user", content: "Which bar is the highest?", images: [picture] }];
    assert.equal((await client.chat({ model, messages, options })).message.content, "It is the green bar.");
  },
  async "what is managed elsewhere"() {
    assert.equal((await client.pull({ model })).status, "success");
    const refused = await refusal(() => client.delete({ model }));
    assert.equal(refused.status_code, 501);
    assert.ok(refused.message.length > 20);
  },
  async "wrong names"() {
    const unknown = await refusal(() => client.chat({ model: "no-such-model", messages: sum }));
    assert.equal(unknown.status_code, 404);
    assert.match(unknown.message, /no-such-model/);
    const task = await refusal(() => client.embed({ model, input: "a" }));
    assert.equal(task.status_code, 400);
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = raised.stack ?? String(raised);
  }
  console.log(JSON.stringify({ check, error }));
}
