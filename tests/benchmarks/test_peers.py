"""The peers' own part: what can be said without installing them. Each is installed and asked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers import known_peers
from benchmarks.peers.__main__ import main
from benchmarks.peers.max import Max
from benchmarks.places import standard_model_in
from benchmarks.standard_work import Needs

NAMES = ["openvino", "vllm", "llamacpp", "llamacpp-int8", "max", "transformers", "infinity"]


@pytest.mark.parametrize("name", NAMES)
def test_a_start_command_has_the_port_the_model_and_the_programs_of_its_own_folder(name: str, tmp_path: Path) -> None:
    peer = known_peers(tmp_path)[name]
    start = peer.start(tmp_path / "model", 4321, Needs(sequences=9, context=4352, threads=2))
    assert start.command[0].startswith(str(peer.home))
    assert {"4321", str(tmp_path / "model")} <= set(start.command)
    assert peer.version in peer.home.name
    assert not peer.installed


def test_the_list_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vllm-0.32.0").mkdir()
    (tmp_path / "vllm-0.32.0" / ".installed").touch()
    assert main(["--cache", str(tmp_path), "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert [line.split()[0] for line in lines if "installed in" in line] == ["vllm"]


@pytest.mark.parametrize("action", [["start", "max"], ["install", "tgi"]])
def test_what_is_not_there_is_named(action: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache", str(tmp_path), *action]) == 1
    assert action[1] in capsys.readouterr().err


def test_weights_are_widened_and_stay_equal(tmp_path: Path) -> None:
    model = standard_model_in(tmp_path, "tiny")
    widened = Max(tmp_path).prepared(model)
    original, wide = load_file(model / "model.safetensors"), load_file(widened / "model.safetensors")
    assert original.keys() == wide.keys()
    assert all(wide[name].dtype == torch.float32 and wide[name].equal(original[name].float()) for name in wide)
    assert json.loads((widened / "config.json").read_text())["dtype"] == "float32"


def test_both_kinds_of_weights_share_a_build_but_not_a_model(tmp_path: Path) -> None:
    peers = known_peers(tmp_path)
    bfloat16, int8 = peers["llamacpp"], peers["llamacpp-int8"]
    assert bfloat16.home == int8.home
    for peer, name in ((bfloat16, "model-bf16.gguf"), (int8, "model-q8_0.gguf")):
        (tmp_path / name).touch()
        assert peer.prepared(tmp_path / "model") == tmp_path / name
