// What the server says of itself and of its load now: `/live`, asked once a second while a view wants it.

import { signal } from "@preact/signals";
import { ask } from "./api.js";

/** The last answer of /live, or null. */
export const facts = signal(/** @type {any} */ (null));

/** Why /live could not be asked; "" when it could. */
export const problem = signal("");

/** Asks once. */
export async function refresh() {
  try {
    facts.value = await ask("/live");
    problem.value = "";
  } catch (error) {
    problem.value = /** @type {Error} */ (error).message;
  }
}
