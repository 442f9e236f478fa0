// Conversations and presets in the browser's IndexedDB. No views.

import { openDB } from "idb";

/** @import {Conversation, Preset} from "./types.js" */

const opened = openDB("tokenyard", 1, {
  upgrade(database) {
    database.createObjectStore("conversations", { keyPath: "id" });
    database.createObjectStore("presets", { keyPath: "name" });
  },
});

/** Newest first. @returns {Promise<Conversation[]>} */
export async function conversations() {
  const all = await (await opened).getAll("conversations");
  return all.sort((a, b) => b.updated - a.updated);
}

/** @param {Conversation} conversation */
export async function keep(conversation) {
  await (await opened).put("conversations", conversation);
}

/** @param {string} id */
export async function forget(id) {
  await (await opened).delete("conversations", id);
}

/** @returns {Promise<Preset[]>} */
export async function presets() {
  return (await opened).getAll("presets");
}

/** @param {Preset} preset */
export async function keepPreset(preset) {
  await (await opened).put("presets", preset);
}

/** @param {string} name */
export async function forgetPreset(name) {
  await (await opened).delete("presets", name);
}

/** Saves a text as a file. @param {string} name @param {string} text */
export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
