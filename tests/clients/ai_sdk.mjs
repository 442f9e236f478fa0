// Vercel's `ai` SDK against a server: node ai_sdk.mjs BASE_URL MODEL
// Prints one JSON line for each check: {"check": "PROVIDER NAME", "error": null or what was wrong}. test_ai_sdk.py reads them.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to stdout
const [base, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({
    name: "yard",
    baseURL: `${base}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  anthropic: createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })(name),
};
// How a user asks each provider to let the model think; the names of models say nothing here.
const thinking = {
  compatible: { yard: { reasoningEffort: "medium" } },
  responses: { openai: { reasoningEffort: "medium", reasoningSummary: "auto", store: false, forceReasoning: true } },
  anthropic: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
};

const sum = "What is 17 + 25?";
const sumAnswer = "17 + 25 = 42.";
const weather = "What is the weather in Paris?";
const verdict = z.object({
  colour: z.enum(["red", "green"]),
  owner: z.object({ kind: z.enum(["person", "company"]), alive: z.boolean() }),
});

function weatherTool(cities) {
  return {
    get_weather: tool({
      description: "Get the weather in a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (cities.push(city), { weather: "sunny" }),
    }),
  };
}

const checks = {
  async text(common) {
    const { text, usage, finishReason } = await generateText({ ...common, prompt: sum });
    assert.equal(text, sumAnswer);
    assert.equal(finishReason, "stop");
    assert.ok(usage.outputTokens > 5);
  },
  async stream(common) {
    const result = streamText({ ...common, prompt: sum });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert.equal(text, sumAnswer);
    assert.ok((await result.usage).inputTokens > 5);
  },
  async object(common) {
    const { object } = await generateObject({ ...common, schema: verdict, prompt: "Judge it." });
    verdict.parse(object);
  },
  async "streamed object"(common) {
    const result = streamObject({ ...common, schema: verdict, prompt: "Judge it." });
    for await (const _ of result.partialObjectStream);
    verdict.parse(await result.object);
  },
  async output(common) {
    const result = await generateText({ ...common, output: Output.object({ schema: verdict }), prompt: "Judge it." });
    verdict.parse(result.output);
  },
  async "tool loop"(common) {
    const cities = [];
    const tools = weatherTool(cities);
    const { text, steps } = await generateText({ ...common, tools, stopWhen: stepCountIs(3), prompt: weather });
    assert.deepEqual(cities, ["Paris"]);
    assert.match(text, /sunny/);
    assert.equal(steps.length, 2);
  },
  async "streamed tool loop"(common) {
    const cities = [];
    const result = streamText({ ...common, tools: weatherTool(cities), stopWhen: stepCountIs(3), prompt: weather });
    assert.match(await result.text, /sunny/);
    assert.deepEqual(cities, ["Paris"]);
  },
  async "named tool"(common) {
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const { toolCalls } = await generateText({ ...common, tools: weatherTool([]), toolChoice, prompt: weather });
    assert.equal(toolCalls.length, 1);
    assert.deepEqual(toolCalls[0].input, { city: "Paris" });
  },
  async reasoning(common, provider) {
    const cities = [];
    const more = { tools: weatherTool(cities), stopWhen: stepCountIs(3), providerOptions: thinking[provider] };
    const { steps, text } = await generateText({ ...common, ...more, maxOutputTokens: 1500, prompt: weather });
    assert.match(steps[0].reasoningText ?? "", /get_weather/);
    assert.deepEqual(cities, ["Paris"]);
    assert.match(text, /sunny/);
  },
};

async function report(check, run) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = [raised.stack, raised.responseBody].filter(Boolean).join("\n") || String(raised);
  }
  console.log(JSON.stringify({ check, error }));
}

for (const [provider, model] of Object.entries(models)) {
  const common = { model, temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
  for (const [check, run] of Object.entries(checks)) {
    if (check === "reasoning" && !(provider in thinking)) continue;
    await report(`${provider} ${check}`, () => run(common, provider));
  }
}
