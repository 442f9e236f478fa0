"""Models whose weights a keeper has: the same logits, with no file of weights, in memory that is there once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_worker.cuda.encoded_experts import PROJECTIONS, put_stacks, stack_of
from model_worker.cuda.fp8_blocks import SIDE, BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.grouped_linear import MIDDLE, TABLE, GroupedLinear
from model_worker.cuda.joined_linear import JoinedLinear
from model_worker.loading.checkpoint import read_config
from model_worker.loading.kept import Keeping, identity_of
from model_worker.loading.load import load_model
from model_worker.loading.prepare import prepare
from model_worker.model import LoadedModel, ModelRefused
from model_worker.runner import ModelRunner
from model_worker.weights.serving import free_weights
from tests.model_worker.cuda.in_four_bits import grouped_layer, in_four_bits
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.keeper.running import Running
from tests.model_worker.tiny_models import own_tiny_model, tiny_model
from tests.model_worker.vision.tiny_composites import gemma3, llava, qwen2_vl
from tests.model_worker.vision.tiny_parts import Tiny, made

need_triton()

# Plain, tied, norms of heads, four norms, experts, sinks, joined projections, and modules of another form.
FAMILIES = ("llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "phi3", "gpt2")
END_TOKENS = [2, 7]


def load(path: Path, keeping: Keeping | None = None) -> LoadedModel:
    """Load a model as on a GPU: its linear modules stay plain."""
    return load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False, keeping=keeping)


def logits(loaded: LoadedModel) -> Tensor:
    runner = ModelRunner(loaded, 8)
    return runner.backend.logits(runner._first_tokens(20))


def shared_memory() -> list[range]:
    """The addresses at which this process has pieces."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:tokenyard-piece" in line:
            first, last = re.findall("[0-9a-f]+", line)[:2]
            found.append(range(int(first, 16), int(last, 16)))
    return found


def lie_there(tensors: Iterable[Tensor]) -> bool:
    places = shared_memory()
    return all(any(tensor.data_ptr() in place for place in places) for tensor in tensors)


def without_weights(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.unlink()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_kept_weights_is_the_model(family: str, keeper: Running, tmp_path: Path) -> None:
    path = own_tiny_model(family, tmp_path / "model")
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": END_TOKENS}))
    first = load(path, Keeping(keeper.worker(), "one"))
    assert lie_there(first.model.parameters())
    want = logits(first)
    without_weights(path)
    second = load(path, Keeping(keeper.worker(), "one"))
    assert second.kept is not None
    assert second.kept.size == sum(map(len, set(shared_memory()))) // 2 > 0
    assert torch.equal(logits(second), want)
    assert second.eos_token_ids == first.eos_token_ids == tuple(END_TOKENS)
    assert (second.parameter_bytes, second.dtype) == (first.parameter_bytes, first.dtype)
    assert [name for name, _ in second.model.named_parameters()] == [n for n, _ in first.model.named_parameters()]
    assert lie_there(second.model.parameters())


@pytest.mark.parametrize("make", [llava, qwen2_vl, gemma3], ids=lambda make: make.__name__)
def test_a_model_that_sees_is_kept_with_its_tower(make: Callable[[], Tiny], keeper: Running, tmp_path: Path) -> None:
    tiny = made(make)
    tiny.model.save_pretrained(tmp_path)
    image = tiny.image(tiny.draw(), 0)
    first = load(tmp_path, Keeping(keeper.worker(), "one"))
    assert first.encoder is not None
    want = logits(first), first.encoder.encode(image)
    without_weights(tmp_path)
    second = load(tmp_path, Keeping(keeper.worker(), "one"))
    assert second.encoder is not None
    assert lie_there([*second.model.parameters(), *second.encoder.composite.parameters()])
    assert torch.equal(logits(second), want[0])
    assert (second.encoder.encode(image) == want[1]).all()
    # The text model's memory is given back whole, although the encoder lives.
    before = len(shared_memory())
    free_weights(second)
    assert len(shared_memory()) == before - 1


def test_what_encodes_images_is_not_kept_without_vision(keeper: Running, tmp_path: Path) -> None:
    made(llava).model.save_pretrained(tmp_path)

    def load_text() -> LoadedModel:
        worker = Keeping(keeper.worker(), "one")
        options: dict[str, Any] = {"has_kernels": lambda *_: False, "vision": False, "keeping": worker}
        return load_model(tmp_path, "float32", "cpu", lambda *_: None, **options)

    first = load_text()
    want = logits(first)
    without_weights(tmp_path)
    second = load_text()
    assert second.encoder is None
    assert torch.equal(logits(second), want)
    found = keeper.worker().find("one")
    assert found is not None
    assert found.facts.unused
    assert not any("vision" in name for name in found.tensors)
    assert lie_there(second.model.parameters())


def test_a_commit_of_the_hub_is_part_of_the_identity(keeper: Running, tmp_path: Path) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    load(path, Keeping(keeper.worker(), "one"))
    config = read_config(path)
    assert Keeping(keeper.worker(), "one").model(config, "Llama") is not None
    config._commit_hash = "0123"
    assert Keeping(keeper.worker(), "one").model(config, "Llama") is None


def in_fp8(linear: nn.Linear) -> Fp8Linear:
    scales = linear.weight.detach().abs().amax(1) / 448
    return Fp8Linear((linear.weight.detach() / scales[:, None]).to(torch.float8_e4m3fn), scales, linear.bias)


def in_fp8_blocks(linear: nn.Linear) -> BlockFp8Linear:
    shape = [-(-size // SIDE) for size in linear.weight.shape]
    return BlockFp8Linear(linear.weight.detach().to(torch.float8_e4m3fn), torch.rand(shape), linear.bias)


def in_order(linear: nn.Linear) -> GroupedLinear:
    """All have one order, as those have that read the same inputs."""
    made = in_four_bits(linear)
    made.order = torch.arange(linear.in_features).flip(0).int()
    return made


def in_mxfp4(linear: nn.Linear) -> GroupedLinear:
    """With a table, and no zeros."""
    made = grouped_layer(linear.out_features, linear.in_features, 32, TABLE)
    made.bias = linear.bias
    return made


def in_eight_bits(linear: nn.Linear) -> GroupedLinear:
    """With one zero for all codes."""
    made = grouped_layer(linear.out_features, linear.in_features, 32, MIDDLE, bits=8)
    made.bias = linear.bias
    return made


@pytest.mark.parametrize("encode", [None, in_fp8, in_fp8_blocks, in_four_bits, in_order, in_mxfp4, in_eight_bits])
def test_joined_weights_come_back_joined(
    encode: Callable[[nn.Linear], nn.Module] | None, keeper: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Joining them again moves nothing. Qwen 2 has biases."""
    path = tiny_model("qwen2", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=96, head_dim=16)
    model: Any = load(path).model

    def parts(model: Any) -> list[Any]:
        attention = model.model.layers[1].self_attn
        return [attention.q_proj, attention.k_proj, attention.v_proj]

    if encode is not None:
        for name in ("q_proj", "k_proj", "v_proj"):
            attention = model.model.layers[1].self_attn
            setattr(attention, name, encode(getattr(attention, name)))
    keeping = Keeping(keeper.worker(), "one")
    keeping.note(model)
    joined = JoinedLinear(parts(model))
    x = torch.randn(3, 64)
    want = joined(x)
    keeping.keep()
    assert lie_there(model.parameters())
    assert torch.equal(joined(x), want)
    again = Keeping(keeper.worker(), "one").model(read_config(path), "Qwen2")
    assert again is not None
    tensors = [parameter for part in parts(again) for parameter in part.parameters()]
    assert len(tensors) == (6 if encode is None else 12 if encode in (in_four_bits, in_order) else 9)
    places = [(tensor.untyped_storage().data_ptr(), tensor.storage_offset()) for tensor in tensors]
    second = JoinedLinear(parts(again))
    assert torch.equal(second(x), want)
    assert all(type(one) is type(other) for one, other in zip(parts(again), parts(model), strict=True))
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(parts(again), parts(model), strict=True))
    assert [(one.untyped_storage().data_ptr(), one.storage_offset()) for one in tensors] == places


@pytest.mark.parametrize(
    ("family", "encode"),
    [("gpt_oss", in_mxfp4), ("qwen3_moe", in_order), ("mixtral", in_fp8), ("mixtral", in_fp8_blocks)],
)
def test_encoded_experts_come_back(
    family: str, encode: Callable[[nn.Linear], nn.Module], keeper: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Those of gpt-oss have biases, and transposed matrices."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    path = tiny_model(family, tmp_path_factory.getbasetemp(), **sizes)
    model: Any = load(path).model
    for layer in model.model.layers:
        shapes = [getattr(layer.mlp.experts, name).shape for name in PROJECTIONS]
        sides = [shape[:0:-1] if family == "gpt_oss" else shape[1:] for shape in shapes]
        linears = [[[encode(nn.Linear(width, height, bias=False))] for _ in range(4)] for height, width in sides]
        put_stacks(layer.mlp.experts, [stack_of(experts, torch.float32) for experts in linears])
        assert [getattr(layer.mlp.experts, name).shape for name in PROJECTIONS] == shapes
    keeping = Keeping(keeper.worker(), "one")
    keeping.note(model)
    inputs = torch.randn(3, 64), torch.tensor([[0, 1], [3, 0], [1, 3]]), torch.rand(3, 2)
    want = model.model.layers[1].mlp.experts(*inputs)
    keeping.keep()
    assert lie_there(model.parameters())
    assert torch.equal(model.model.layers[1].mlp.experts(*inputs), want)
    again: Any = Keeping(keeper.worker(), "one").model(read_config(path), family)
    assert again is not None
    assert lie_there(again.parameters())
    assert again.state_dict().keys() == model.state_dict().keys()
    kept, before = (one.model.layers[1].mlp.experts for one in (again, model))
    assert torch.equal(kept(*inputs), want)
    for name in PROJECTIONS:
        stack, first = getattr(kept, name), getattr(before, name)
        assert (type(stack), stack.shape) == (type(first), first.shape)
        assert torch.equal(stack[2], first[2])
    for parameter in (*model.parameters(), *again.parameters()):
        # Modules that compute with stacks know themselves, and go when cycles are looked for.
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def test_weights_that_are_taken_away_leave_the_keeper_too(keeper: Running, tmp_path: Path) -> None:
    """As for other weights, or a trainer that wants the GPU's memory."""
    path = own_tiny_model("llama", tmp_path / "model")
    free_weights(load(path, Keeping(keeper.worker(), "one")))
    assert keeper.memory.handles == []
    assert shared_memory() == []
    free_weights(load(path, Keeping(keeper.worker(), "one")))
    second = load(path, Keeping(keeper.worker(), "one"))
    assert second.kept is not None
    assert second.kept.size
    free_weights(second)
    assert second.kept.size == 0
    assert shared_memory() == []


def test_kept_weights_that_make_no_model_are_read_anew(
    keeper: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    first = load(path, Keeping(keeper.worker(), "one"))
    want = logits(first)
    config = json.loads((path / "config.json").read_text())
    for layers in (2, 3):
        (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        found = load(path, Keeping(keeper.worker(), "one"))
        assert "make no model" in caplog.text
        assert first.kept is not None
        assert found.kept is not None
        assert sum(map(len, set(shared_memory()))) == first.kept.size + found.kept.size
        caplog.clear()
    assert torch.equal(logits(found), want)


def test_a_kept_model_that_fails_its_proof_is_let_go_and_read(
    keeper: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    want = logits(load(path, Keeping(keeper.worker(), "one")))
    assert shared_memory() == []
    kept: list[bool] = []

    def proven(model: Any, *rest: Any) -> LoadedModel:
        kept.append(lie_there(model.parameters()))
        if kept[-1]:
            raise ModelRefused("LlamaForCausalLM", "its logits are others")
        # Files are not read beside weights that nobody uses.
        assert not keeper.memory.handles
        assert not shared_memory()
        return prepare(model, *rest)

    monkeypatch.setattr("model_worker.loading.load.prepare", proven)
    second = load(path, Keeping(keeper.worker(), "one"))
    assert kept == [True, False]
    assert "fails its proof: its logits are others" in caplog.text
    assert torch.equal(logits(second), want)
    assert second.kept is not None
    assert second.kept.size


def test_memory_that_runs_out_is_no_fault_of_what_was_kept(
    keeper: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    load(path, Keeping(keeper.worker(), "one"))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr("model_worker.loading.kept.kept_model", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(path, Keeping(keeper.worker(), "one"))


def test_an_identity_is_that_of_files_and_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    one = identity_of(str(path), [], "auto", None)
    assert one == identity_of(str(path), [], "auto", None) != ""
    overlay = tmp_path / "overlay.safetensors"
    overlay.write_bytes(b"1")
    others = [
        identity_of(str(path), [], "auto", 100),
        identity_of(str(path), [], "float32", None),
        identity_of(str(path), [str(overlay)], "auto", None),
        identity_of(str(own_tiny_model("llama", tmp_path / "other")), [], "auto", None),
    ]
    facts = (path / "model.safetensors").stat()
    os.utime(path / "model.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    others.append(identity_of(str(path), [], "auto", None))
    assert len({one, *others}) == 6
    (path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    assert identity_of(str(path), [], "auto", None) == ""
    assert "cannot be told apart: [Errno 2]" in caplog.text
    assert identity_of("no-such/model", [], "auto", None) == ""
    assert identity_of(str(overlay), [], "auto", None) == ""
