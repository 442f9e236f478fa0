// Builds the page's bundle: `node build.mjs FOLDER`. The same source gives the same bytes on every machine.

import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2] ?? join(here, "../api_server/web/page_files");
const source = join(here, "src");
const modules = join(here, "node_modules");

/** The packages whose code is in the bundle, with their licences' texts. */
function notice(inputs) {
  const names = inputs.map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1]).filter(Boolean);
  const parts = [...new Set(names)].sort().map((name) => {
    const { version, license } = JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8"));
    const file = readdirSync(join(modules, name)).find((found) => /^licen[cs]e/i.test(found));
    if (!file) throw new Error(`${name} has no file with its licence`);
    return `${name} ${version}, ${license}\n\n${readFileSync(join(modules, name, file), "utf8").trim()}\n`;
  });
  const rule = `\n${"-".repeat(80)}\n\n`;
  return `The page of tokenyard contains these packages. Of DOMPurify's two licences it uses the Apache License 2.0.\n${rule}${parts.join(rule)}`;
}

/** Writes a file, and its gzip form without a time or a machine in it. */
function write(name, content) {
  const zipped = gzipSync(content, { level: constants.Z_BEST_COMPRESSION });
  zipped[9] = 255;
  writeFileSync(join(folder, name), content);
  writeFileSync(join(folder, `${name}.gz`), zipped);
}

const options = {
  bundle: true,
  minify: true,
  write: false,
  legalComments: "none",
  target: "es2022",
  outdir: "out",
  entryNames: "[name]-[hash]",
  chunkNames: "[name]-[hash]",
};
const script = await build({
  ...options,
  entryPoints: [{ in: join(source, "main.js"), out: "page" }],
  // A view that needs a large library is loaded when it is opened.
  splitting: true,
  format: "esm",
  metafile: true,
});
const style = await build({ ...options, entryPoints: [{ in: join(source, "style.css"), out: "page" }] });
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder, { recursive: true });
let index = readFileSync(join(source, "index.html"), "utf8");
for (const [mark, { outputFiles }] of Object.entries({ SCRIPT: script, STYLE: style })) {
  for (const { path, contents } of outputFiles) {
    write(basename(path), contents);
    if (basename(path).startsWith("page-")) index = index.replace(mark, basename(path));
  }
}
write("index.html", index);
write("icon.svg", readFileSync(join(source, "icon.svg")));
write("NOTICE.txt", notice(Object.keys(script.metafile.inputs)));
