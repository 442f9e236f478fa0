"""What must be equal in all workers of a scheduler."""

from __future__ import annotations

import json
from pathlib import Path

from shared.model_facts import model_facts
from shared.settings import Settings


def folder(path: Path, weights: bytes = b"weights" * 400_000, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (path / "model.safetensors").write_bytes(weights)
    return path


def facts(path: Path, quantization: str = "none") -> dict[str, str]:
    return model_facts(Settings(model=str(path), quantization=quantization))


def test_copies_have_equal_facts_wherever_they_are(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", _name_or_path="x", transformers_version="1")
    second = folder(tmp_path / "b", _name_or_path="y", transformers_version="2")
    assert facts(first) == facts(second)


def test_another_config_weight_or_setting_is_seen(tmp_path: Path) -> None:
    usual = facts(folder(tmp_path / "a"))

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name in usual if usual[name] != other[name]}

    assert differing(facts(folder(tmp_path / "b", hidden_size=9))) == {"config"}
    assert differing(facts(folder(tmp_path / "c", weights=b"weights" * 400_000 + b"!"))) == {"weights"}
    assert differing(facts(folder(tmp_path / "d", weights=b"Weights" + b"weights" * 399_999))) == {"weights"}
    assert differing(facts(tmp_path / "a", quantization="int8")) == {"quantization"}


def test_a_single_file_is_a_model_too(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF one")
    (tmp_path / "b.gguf").write_bytes(b"GGUF two")
    one, two = facts(tmp_path / "a.gguf"), facts(tmp_path / "b.gguf")
    assert {name for name in one if one[name] != two[name]} == {"weights"}
    assert facts(tmp_path / "none")["weights"]
