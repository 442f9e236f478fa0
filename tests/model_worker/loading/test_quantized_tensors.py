"""Tensors of quantized weights are known by their names, read with their groups, and refused by name if malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_worker.loading.quantized.read import Weights, is_quantized, read_weights
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import StoredCheckpoint, open_stored
from tests.model_worker.loading.quantized_checkpoints import FORMATS

OUTPUTS = 32
INPUTS = 128
MODULE = "model.layers.0.mlp.up_proj"
ONE = torch.ones(1)


def stored(path: Path, tensors: dict[str, Tensor]) -> StoredCheckpoint:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    return open_stored(path)


def written(name: str) -> dict[str, Tensor]:
    """The tensors of a weight in a format, by the ends of their names."""
    return FORMATS[name].write(torch.Generator().manual_seed(0), OUTPUTS, INPUTS).tensors


def read(path: Path, tensors: dict[str, Tensor], method: str = "", **fields: Any) -> Weights:
    found = stored(path, {f"{MODULE}.{end}": tensor for end, tensor in tensors.items()})
    return read_weights(found, Scheme(method, fields))


def weight(path: Path, tensors: dict[str, Tensor], method: str = "", **fields: Any) -> Tensor:
    return read(path, tensors, method, **fields).encoded[f"{MODULE}.weight"].decoded(torch.float32)


PLAIN = ["router.per_expert_scale", "attn.per_dim_scale", "logit_scale", "residual_scale", "free_blocks", "is_packed"]


def test_plain_tensors_may_have_names_like_those_of_scales(tmp_path: Path) -> None:
    tensors = {name: torch.ones(4) for name in [*PLAIN, "router.proj.weight", "attn.q_proj.weight"]}
    checkpoint = stored(tmp_path, tensors)
    assert not is_quantized(checkpoint, Scheme())
    for method in ("", "fp8"):
        weights = read_weights(checkpoint, Scheme(method))
        assert set(weights.plain) == set(tensors)


@pytest.mark.parametrize(
    "names",
    [
        ("a.weight_scale",),
        ("a.experts.up", "a.experts.up_scale"),
        ("a.experts.up", "a.experts.up_scale_inv"),
        ("a.up_blocks", "a.up_scales"),
        ("a.up_packed", "a.up_shape"),
        ("a.qweight",),
    ],
)
def test_names_of_quantized_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {name: torch.ones(1) for name in [*names, "b.weight"]}
    assert is_quantized(stored(tmp_path, tensors), Scheme())


@pytest.mark.parametrize("name", ["activation_scale", "kv_scale", "input_scale", "up_activation_scale"])
def test_scales_of_activations_are_left_alone(name: str, tmp_path: Path) -> None:
    weights = read(tmp_path, {**written("fp8 of tensors"), name: ONE}, "fp8", activation_scheme="static")
    assert set(weights.encoded) == {f"{MODULE}.weight"}
    assert not weights.plain


@pytest.mark.parametrize("name", ["pre_quant_scale", "pre_quant_scale_inv", "smooth_scale"])
def test_other_scales_of_a_quantized_layer_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"cannot be read, such as {MODULE}\.{name}"):
        read(tmp_path, {**written("fp8 of tensors"), name: ONE}, "fp8")


def narrow(count: int) -> Any:
    return lambda tensor: tensor.flatten()[:count]


# The format, the tensor that is altered, and how.
MALFORMED = [
    ("awq", "qweight", narrow(8)),
    ("awq", "qweight", lambda codes: codes.long()),
    ("gptq", "qzeros", lambda zeros: zeros.to(torch.int16)),
    ("w4a16", "weight_packed", lambda codes: codes.long()),
    ("awq", "scales", lambda _: torch.tensor(1.0)),
    ("awq", "scales", lambda scales: torch.ones_like(scales, dtype=torch.int32)),
    ("w8a8", "weight_scale", lambda scales: torch.ones_like(scales, dtype=torch.int8)),
    ("gptq", "qweight", narrow(8)),
    ("gptq", "scales", narrow(8)),
    ("gptq", "g_idx", narrow(0)),
    ("w4a16", "weight_packed", narrow(8)),
    ("w4a16", "weight_scale", narrow(OUTPUTS)),
    ("w4a16 with zeros", "weight_zero_point", lambda zeros: zeros[:, :2]),
    ("w4a16 in order of activations", "weight_g_idx", narrow(0)),
    ("nvfp4", "weight_packed", narrow(8)),
    ("nvfp4", "weight_global_scale", lambda _: torch.zeros(1)),
    ("nvfp4", "weight_global_scale", lambda _: torch.tensor([torch.inf])),
    ("nvfp4 of ModelOpt", "weight_scale_2", lambda _: torch.tensor(torch.nan)),
    ("w4a16", "weight_shape", narrow(1)),
    ("w4a16", "weight_shape", lambda sizes: -sizes),
    ("w4a16 with zeros", "weight_zero_point", narrow(1)),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", narrow(9)),
    ("nf4", "weight.quant_map", narrow(15)),
    ("nf4", "weight", lambda codes: codes[:9].view(torch.int8)),
    ("nf4, nested", "weight.nested_absmax", narrow(0)),
    ("nf4, nested", "weight.nested_quant_map", narrow(3)),
]


@pytest.mark.parametrize(("name", "end", "alter"), MALFORMED)
def test_malformed_tensors_are_refused_by_name(name: str, end: str, alter: Any, tmp_path: Path) -> None:
    tensors = written(name)
    tensors[end] = alter(tensors[end])
    config = FORMATS[name].config
    with pytest.raises(ValueError, match=MODULE):
        read(tmp_path, tensors, config["quant_method"], **config)


def test_zeros_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    zeros = torch.ones(5, dtype=torch.int8)
    with pytest.raises(ValueError, match=rf"{MODULE}\.weight_zero_point \(I8 \[5\]\)"):
        read(tmp_path, {**written("w8a8"), "weight_zero_point": zeros}, "compressed-tensors")


@pytest.mark.parametrize(("name", "axis"), [("gptq", 0), ("awq", 0), ("w4a16", 1)])
def test_the_last_group_may_be_shorter(name: str, axis: int, tmp_path: Path) -> None:
    """80 inputs are two groups of 32 and one of 16, as the config says, and not three of 27."""
    tensors = written(name)
    tensors.pop("g_idx", None)
    codes = "weight_packed" if axis else "qweight"
    config: dict[str, Any] = {"group_size": 32, "bits": 4}
    if axis:
        config = {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}}}
    method = FORMATS[name].config["quant_method"]
    whole = weight(tmp_path, tensors, method, **config)
    kept = 80 if name == "awq" else 10
    tensors[codes] = tensors[codes].narrow(axis, 0, kept)
    for end in ("scales", "qzeros", "weight_scale"):
        if end in tensors:
            tensors[end] = tensors[end].narrow(axis, 0, 3)
    if axis:
        tensors["weight_shape"] = torch.tensor([OUTPUTS, 80])
    assert torch.equal(weight(tmp_path, tensors, method, **config), whole[:, :80])
    with pytest.raises(ValueError, match="has 80 inputs and 3 groups of scales, which are not equal groups"):
        read(tmp_path, tensors, method)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_groups_that_the_config_does_not_name_are_refused(name: str, tmp_path: Path) -> None:
    tensors = written(name)
    tensors.pop("g_idx", None)
    with pytest.raises(ValueError, match="128 inputs and 4 groups of scales, which are not groups of 64"):
        read(tmp_path, tensors, name, group_size=64)
    # Some layers may have groups of their own.
    assert read(tmp_path, tensors, name, group_size=64, dynamic={"+:.*up_proj": {"group_size": 32}}).encoded


def groups_of(**weights: Any) -> dict[str, Any]:
    """The config of compressed-tensors with one group of layers."""
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}}


# A format, what its config says, and the part that the config says there is.
PROMISED: list[tuple[str, dict[str, Any], str]] = [
    ("w4a16", {"symmetric": False}, "has no weight_zero_point beside it, and config.json has symmetric false"),
    ("w4a16", {"actorder": "group"}, "has no weight_g_idx beside it, and config.json has actorder 'group'"),
    ("w4a16", {"actorder": True}, "has no weight_g_idx beside it, and config.json has actorder True"),
    ("w8a8", {"num_bits": 8, "symmetric": False}, "has no weight_zero_point beside it"),
]


@pytest.mark.parametrize(("name", "said", "reason"), PROMISED)
def test_parts_that_the_config_promises_must_be_there(
    name: str, said: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        read(tmp_path, written(name), "compressed-tensors", **groups_of(**said))
    # A group that names the layer says what holds, whatever others say.
    named = {"targets": ["re:.*up_proj"], "weights": {"num_bits": said.get("num_bits", 4)}}
    groups = {**groups_of(**said)["config_groups"], "b": named}
    assert read(tmp_path, written(name), "compressed-tensors", config_groups=groups).encoded


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_other_orders_need_no_groups_of_inputs(order: Any, tmp_path: Path) -> None:
    assert read(tmp_path, written("w4a16"), "compressed-tensors", **groups_of(actorder=order)).encoded


def test_groups_of_inputs_are_all_unset_or_none(tmp_path: Path) -> None:
    plain = written("w4a16")
    unset = torch.full((INPUTS,), -1, dtype=torch.int32)
    found = weight(tmp_path, {**plain, "weight_g_idx": unset}, "compressed-tensors")
    assert torch.equal(found, weight(tmp_path, plain, "compressed-tensors"))
    unset[1:] = torch.arange(1, INPUTS) // 32
    with pytest.raises(ValueError, match=rf"{MODULE}\.weight_g_idx names group -1; there are 4"):
        read(tmp_path, {**plain, "weight_g_idx": unset}, "compressed-tensors")


def test_int8_of_groups_is_refused_in_an_order_of_inputs(tmp_path: Path) -> None:
    scales = torch.rand(OUTPUTS, 4) + 0.5
    tensors = {"weight": written("w8a8")["weight"], "weight_scale": scales}
    groups = (torch.arange(INPUTS) // 32).int()
    said = groups_of(num_bits=8, actorder="group")
    assert read(tmp_path, {**tensors, "weight_g_idx": groups}, "compressed-tensors", **said).encoded
    with pytest.raises(ValueError, match="in an order of their own"):
        read(tmp_path, {**tensors, "weight_g_idx": groups.flip(0)}, "compressed-tensors", **said)
    with pytest.raises(ValueError, match="has no weight_g_idx beside it"):
        read(tmp_path, tensors, "compressed-tensors", **said)


@pytest.mark.parametrize(("zero", "reason"), [(-9, "has the zero -9; those of"), (9, "has the zero 9"), (-8, "")])
def test_zeros_that_the_bits_lack_are_refused(zero: int, reason: str, tmp_path: Path) -> None:
    plain = written("w4a16")
    zeros = torch.zeros(OUTPUTS, 4, dtype=torch.int8)
    zeros[5, 2] = zero
    if reason:
        with pytest.raises(ValueError, match=rf"{MODULE}\.weight_zero_point {reason}"):
            read(tmp_path, {**plain, "weight_zero_point": zeros}, "compressed-tensors")
        return
    shifted = weight(tmp_path, {**plain, "weight_zero_point": zeros}, "compressed-tensors")
    rise = zeros.float().repeat_interleave(32, 1) * plain["weight_scale"].float().repeat_interleave(32, 1)
    torch.testing.assert_close(shifted, weight(tmp_path, plain, "compressed-tensors") - rise)


# A format, the fields of its config that are wrong, and how the fault is named.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("w4a16", groups_of(num_bits="four"), r"config_groups\.a\.weights\.num_bits 'four'; it must be a whole number"),
    ("w4a16", groups_of(num_bits=None), r"config_groups\.a\.weights\.num_bits None"),
    ("w4a16", groups_of(num_bits=[4]), r"config_groups\.a\.weights\.num_bits \[4\]"),
    ("w4a16", groups_of(group_size="x"), r"config_groups\.a\.weights\.group_size 'x'"),
    ("w4a16", groups_of(symmetric="no"), r"config_groups\.a\.weights\.symmetric 'no'; it must be true or false"),
    ("w4a16", groups_of(actorder="columns"), r"config_groups\.a\.weights\.actorder 'columns'"),
    ("w4a16", {"config_groups": ["a"]}, r"config_groups \['a'\]; it must be an object"),
    ("w8a8", groups_of(block_structure=[32]), r"config_groups\.a\.weights\.block_structure \[32\]; it must be two"),
    ("fp8 of blocks", {"weight_block_size": [32]}, r"weight_block_size \[32\]; it must be two whole numbers"),
    ("fp8 of blocks", {"weight_block_size": 32}, "weight_block_size 32; it must be two whole numbers"),
    ("fp8 of blocks", {"weight_block_size": [0, 0]}, r"weight_block_size\[0\] 0; it must be a whole number of at"),
    ("gptq", {"bits": "many"}, "bits 'many'"),
    ("gptq", {"group_size": 0.5}, "group_size 0.5"),
    ("awq", {"group_size": "a"}, "group_size 'a'"),
]


@pytest.mark.parametrize(("name", "fields", "reason"), WRONG)
def test_wrong_fields_are_named(name: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    method = FORMATS[name].config["quant_method"]
    tensors = written(name)
    tensors.pop("g_idx", None)
    with pytest.raises(ValueError, match=f"config.json has {reason}"):
        read(tmp_path, tensors, method, **fields)
