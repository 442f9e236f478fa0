"""Which tests run beside which: `pytest --lane NAME,...` collects those of some lanes, and imports no others.

`make test` runs two processes at once, each mostly on one core: tests that need neither kernels nor servers, and tests
that compute in their own process. The tests of servers, which want both cores, follow by themselves. Without the option
all run, one after another. `make test-fast` runs the first two lanes without what has the mark `slow`. The lane of a
file is that of its own path in the table below, or of its folder's, or `api`.
"""

from __future__ import annotations

from pathlib import PurePath

# Neither kernels nor servers: texts, wire, settings, supervision; and LAST_OF_API.
API = "api"
# What model workers do, in the tests' own process.
KERNELS = "kernels"
# Scheduler and worker together, in the tests' own process; and the first start of a server that finds no kernels.
SYSTEM = "system"
# Servers that compute, and what is about their speed.
SERVING = "serving"
LANES = (API, KERNELS, SYSTEM, SERVING)

# The first tests of all: where no kernels are yet, it makes those of the others.
COLD_START = "system/test_cold_start.py"

# These compute, but at the end of the lane that ends first: the other one has made its kernels by then.
LAST_OF_API = (
    "benchmarks/test_perplexity.py",
    *(f"model_worker/{folder}" for folder in ("cuda", "hearing", "pixels", "recurrent")),
)

_IN_PROCESS = (
    *("ahead", "deterministic", "drafts", "greedy_equality", "hidden_states", "image_equality", "llm"),
    *("logprobs", "offline", "refused_join", "sampled_stability", "structured_rows", "watermark"),
)
# The longest path that fits decides.
PLACES = {
    "benchmarks": SERVING,
    "chaos": SERVING,
    "components": SERVING,
    "demo_model": KERNELS,
    "deploy/test_offline_images.py": KERNELS,
    "deploy/test_offline_pooling.py": KERNELS,
    "deploy/test_offline_speech.py": KERNELS,
    "docs/test_readme.py": SERVING,
    "docs/test_served_pages.py": SERVING,
    "model_worker": KERNELS,
    "one_shot": SERVING,
    "shared/gguf/test_code_blocks.py": KERNELS,
    "system": SERVING,
    "ui": SERVING,
    "ui/test_bundle.py": API,
    COLD_START: SYSTEM,
    **{f"system/test_{name}.py": SYSTEM for name in _IN_PROCESS},
    **dict.fromkeys(LAST_OF_API, API),
}

# Files and folders whose tests wait for real processes or for clocks; they have the mark `slow`.
SLOW = (
    *("api_server/test_process.py", "api_server/http/test_tls.py", "api_server/http/test_unread.py"),
    *(f"api_server/media/test_{name}.py" for name in ("client", "dialects", "media_process", "video_dialects")),
    "api_server/media/test_sound_clips.py",
    *(f"deploy/test_{name}.py" for name in ("forkserver", "hang_watch", "serve", "supervisor", "supervisor_groups")),
    "model_worker/tensor_parallel",
    "model_worker/test_loop.py",
    "shared/test_curve.py",
    "shared/test_forkserver.py",
)


def is_slow(path: PurePath) -> bool:
    """Whether all tests of a file, given its path within tests/, are left out of `make test-fast`."""
    return any(str(place) in SLOW for place in (path, *path.parents))


def lane_of(path: PurePath) -> str:
    """Return the lane of a test file, given its path within tests/."""
    for place in (path, *path.parents):
        if str(place) in PLACES:
            return PLACES[str(place)]
    return API


def place_in_lane(path: PurePath) -> int:
    """Return the place of a test file among those of its lane: the cold start is first, what has run beside is last."""
    if str(path) == COLD_START:
        return 0
    is_last = any(str(place) in LAST_OF_API for place in (path, *path.parents))
    return 2 if is_last or path.name == "test_variants.py" else 1
