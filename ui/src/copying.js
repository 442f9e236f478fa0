// Copies text to the clipboard, and says so on the button.

/** @param {string} text @param {Element | null} [button] */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    return;
  }
  if (!button) return;
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}
