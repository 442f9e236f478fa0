"""The committed bundle is what the source builds, and the source is what its types say."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from api_server.web.page import FOLDER
from tests.ui.conftest import OLDEST_NODE, problem_of, run_script

# Compressed bytes of a page that has just been opened. Charts come with the view Live, and formulas with the first one.
MOST_BYTES = 100_000
LATER = ("NOTICE", "live-", "raw-", "images-", "math-")


# A server that answers with events, and then with an end that comes too early; no time passes between attempts.
STREAMS = """
Object.defineProperty(globalThis, "sessionStorage", { value: { getItem: () => null }, configurable: true });
globalThis.setTimeout = (job) => queueMicrotask(job);
globalThis.clearTimeout = () => {};
let asked = 0;
globalThis.fetch = async (path, { headers }) => {
  asked += 1;
  if (asked > 100) process.exit(3);
  const at = Number(headers["last-event-id"] ?? 0) + 1;
  return new Response(EVENTS(at));
};
const { stream } = await import("./src/api.js");
const read = [];
try {
  const options = { signal: new AbortController().signal, requestId: "x" };
  for await (const { value } of stream("/", {}, options)) read.push(value);
  console.log(JSON.stringify({ asked, read }));
} catch (error) {
  console.log(JSON.stringify({ asked, read, status: error.status, message: error.message }));
}
"""


def test_a_stream_that_is_always_empty_ends_with_an_error(source: Path) -> None:
    found = json.loads(run_script(source, STREAMS.replace("EVENTS(at)", '""')))
    message = "the answer broke off 9 times before its end"
    assert found == {"asked": 9, "read": [], "status": 502, "message": message}


def test_a_stream_that_breaks_after_each_event_is_read_to_its_end(source: Path) -> None:
    events = "at > 20 ? 'data: [DONE]\\n\\n' : `id: ${at}\\ndata: ${at}\\n\\n`"
    found = json.loads(run_script(source, STREAMS.replace("EVENTS(at)", events)))
    assert found == {"asked": 21, "read": list(range(1, 21))}


def test_the_list_takes_a_stored_conversation_without_reading_the_others(source: Path) -> None:
    script = """
    import { withNewest } from "./src/conversation.js";
    const list = [{ id: "a", updated: 5 }, { id: "b", updated: 3 }];
    const forms = [withNewest(list, { id: "b", updated: 9 }), withNewest(list, { id: "c", updated: 4 })];
    console.log(JSON.stringify(forms.map((form) => form.map(({ id, updated }) => id + updated).join(" "))));
    """
    assert json.loads(run_script(source, script)) == ["b9 a5", "a5 c4 b3"]
    # Once at the start, once after a deletion, and once after an import.
    assert (source / "src" / "chat.js").read_text().count("await load()") == 3


def test_the_bundle_is_what_the_source_builds(source: Path, tmp_path: Path) -> None:
    built = tmp_path / "page_files"
    subprocess.run(["node", "build.mjs", str(built)], cwd=source, timeout=120, check=True)
    names = {path.name for path in built.iterdir()}
    assert names == {path.name for path in FOLDER.iterdir()}, "run `make ui` and commit api_server/web/page_files"
    for name in names:
        committed = (FOLDER / name).read_bytes()
        fresh = (built / name).read_bytes()
        if name.endswith(".gz"):
            # Versions of zlib compress differently.
            committed = gzip.decompress(committed)
            fresh = gzip.decompress(fresh)
        assert committed == fresh, f"{name} is not what the source builds: run `make ui`"


@pytest.mark.parametrize(("version", "fits"), [("v18.19.0", False), ("v20.0.0", True), ("v26.1.0", True), ("", False)])
def test_an_old_node_is_no_failure(tmp_path: Path, version: str, fits: bool) -> None:
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\necho {version}\n")
    node.chmod(0o755)
    assert (problem_of("npm", str(node)) == "") is fits
    assert problem_of(None, str(node))


def test_the_oldest_node_is_that_of_the_package() -> None:
    package = json.loads((Path(__file__).parents[2] / "ui" / "package.json").read_text())
    assert package["engines"]["node"] == f">={OLDEST_NODE}"


def test_types_fit(source: Path) -> None:
    done = subprocess.run(
        ["npx", "tsc", "--noEmit"], cwd=source, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


def test_each_file_is_compressed_as_it_is() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix != ".gz"]
    assert {"index.html", "NOTICE.txt", "icon.svg"} <= {path.name for path in files}
    for path in files:
        assert gzip.decompress(path.with_name(path.name + ".gz").read_bytes()) == path.read_bytes()


def test_a_visit_takes_less_than_its_budget() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix == ".gz" and not path.name.startswith(LATER)]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
