"""GuideLLM, as it comes, measures the server: its report and the server's own counters say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.loopback import is_alone
from tests.system.server import Server

COMMAND = Path(sys.prefix).parent / "guidellm" / "bin" / "guidellm"
MODEL = Path(__file__).parents[2] / "deploy" / "embedded_model" / "weights"
REQUESTS = 6
COUNTERS = ("tokenyard_request_prompt_tokens_sum", "tokenyard_request_generation_tokens_sum")


@pytest.mark.skipif(not is_alone(), reason="this system lets no process make a network namespace")
@pytest.mark.skipif(not COMMAND.is_file(), reason="make setup-clients has not installed guidellm")
def test_its_report_agrees_with_the_servers_counters(server: Server, tmp_path: Path) -> None:
    before = server.totals(*COUNTERS)
    report = tmp_path / "report.json"
    flags = {
        "--backend": f"kind=openai_http,target={server.url},model=tokenyard-demo",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={MODEL}",
        "--data": "kind=synthetic_text,prompt_tokens=60,output_tokens=12",
        "--output": f"kind=json,path={report}",
    }
    done = subprocess.run(
        [COMMAND, "run", *(word for pair in flags.items() for word in pair), "--disable-console"],
        env=os.environ | {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = json.loads(report.read_text())["benchmarks"]
    metrics = measured["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    seen = [metrics[name]["successful"]["total_sum"] for name in ("prompt_token_count", "output_token_count")]
    counted = [after - once for after, once in zip(server.totals(*COUNTERS), before, strict=True)]
    assert seen == counted
    assert seen[1] == 12 * REQUESTS
    times = [metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")]
    assert all(one["count"] and one["mean"] > 0 for one in times)
