"""Logits processors of the operator: what they are given, in which order, and what happens when they fail."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from interfaces import BatchProcessorInputs, ProcessorInputs, SamplingParams
from interfaces.request.sampling import LogprobMode
from model_worker.sampling.registry import ProcessorForm, load_processors
from tests.model_worker.drafters.oracle import Oracle
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load


class Always:
    """Leaves one token."""

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        for row, values in enumerate(parameters):
            kept[row, values["token"]] = logits[row, values["token"]]
        return kept


class Counting:
    """The next token is the number of tokens before it: it sees prompt and output."""

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        for row, values in enumerate(parameters):
            request = values["__req__"]
            logits[row, len(request.origin_input_ids) * 10 + len(request.output_ids)] = 1e4
        return logits


class Failing:
    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        raise RuntimeError("on purpose")


class Narrow:
    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        return logits[:, :3]


HERE = __name__
PATHS = {name: f"{HERE}:{name}" for name in ("Always", "Counting", "Failing", "Narrow")}


def run(tmp_path: Path, *requests: tuple[str, dict[str, Any]]) -> InProcessServer:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    server = InProcessServer(loaded, Shape(processors=load_processors(PATHS)))
    for name, values in requests:
        params = SamplingParams(
            max_new_tokens=6,
            named_processors={name: json.dumps(values)} if name else {},
            logprobs=LogprobMode.TEMPERED,
        )
        server.submit([5, 6, 7], params)
    server.run()
    return server


def test_each_row_has_its_own_parameters(tmp_path: Path) -> None:
    server = run(tmp_path, ("Always", {"token": 11}), ("", {}), ("Always", {"token": 12}), ("Counting", {}))
    assert server.answers[0].tokens == [11] * 6
    assert server.answers[2].tokens == [12] * 6
    assert server.answers[3].tokens == [30, 31, 32, 33, 34, 35]
    assert len(server.answers[1].tokens) == 6
    assert server.answers[0].logprobs == [0.0] * 6


@pytest.mark.parametrize("name", ["Failing", "Narrow"])
def test_one_that_fails_fails_its_request_alone(tmp_path: Path, name: str) -> None:
    server = run(tmp_path, ("Always", {"token": 11}), (name, {}))
    assert server.answers[0].tokens == [11] * 6
    assert f"the logits processor '{name}' failed" in server.answers[1].error
    assert all(worker.pool.used == 0 for worker in server.scheduler.workers.values())


def test_a_name_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    server = run(tmp_path, ("os.system", {}))
    assert "is not allowed" in server.answers[0].error


@pytest.mark.parametrize("path", ["no.such.module:X", f"{HERE}:Missing", "os:path", "os:getcwd"])
def test_what_cannot_be_loaded_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        load_processors({"p": path})


class ForRequest:
    """The interface documents' form for one request: the next token is `base` and the length of the sequence."""

    parameter_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"base": {"type": "integer", "minimum": 0}},
        "required": ["base"],
        "additionalProperties": False,
    }

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.base = parameters["base"]

    def __call__(self, inputs: ProcessorInputs) -> None:
        assert inputs.logits.shape[0] == 1
        token = self.base + len(inputs.context.tokens)
        inputs.logits[-1].fill_(-torch.inf)
        inputs.logits[-1, token] = 0.0


class ForBatch:
    """The interface documents' batch form: the next token is `base` and the number of generated tokens."""

    def __call__(self, inputs: BatchProcessorInputs) -> None:
        assert inputs.logit_offsets is None
        for row, (context, parameters) in enumerate(zip(inputs.context_batch, inputs.parameters, strict=True)):
            inputs.logits[row].fill_(-torch.inf)
            inputs.logits[row, parameters["base"] + context.tokens.generated_length] = 0.0


class LikeSGLang:
    """SGLang's own classes give the second argument a default."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        assert custom_param_list is not None
        return Always()(logits, custom_param_list)


class Avoiding:
    """Lowers the logits of all tokens of the answer so far."""

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        for row, values in enumerate(parameters):
            for token in values["__req__"].output_ids:
                logits[row, token] -= 0.5
        return logits


class Replacing:
    def __call__(self, inputs: BatchProcessorInputs) -> None:
        inputs.logits = inputs.logits + 1


class AddsOne:
    """Leaves the order of logits as it is, and counts its calls."""

    keeps_largest = True
    calls = 0

    def __call__(self, inputs: BatchProcessorInputs) -> None:
        AddsOne.calls += 1
        inputs.logits += 1.0


class LikeVLLM:
    """vLLM's form: the next token is `base` and the tokens before it, as the lists that it keeps by slot have them."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs > 0
        self.requests: dict[int, tuple[int, list[int], list[int]]] = {}

    @classmethod
    def validate_params(cls, params: Any) -> None:
        if params.extra_args.get("base", 0) < 0:
            raise ValueError("base must be at least 0")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        # In the order of vLLM's own: a slot that is taken again at once is not among the removed.
        for slot, params, prompt, output in batch_update.added:
            self.requests[slot] = params.extra_args["base"], prompt, output
        for slot in batch_update.removed:
            del self.requests[slot]
        assert not batch_update.moved
        assert max(self.requests, default=-1) < batch_update.batch_size

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for slot, (base, prompt, output) in self.requests.items():
            logits[slot].fill_(-torch.inf)
            logits[slot, base + len(prompt) + len(output)] = 0.0
        return logits


FORMS = ("ForRequest", "ForBatch", "LikeSGLang", "Avoiding", "Replacing", "AddsOne", "LikeVLLM")
LOGITS_PROCESSORS = {"of-module": ForRequest, "other": ForBatch}


def serve(
    tmp_path: Path, requests: list[dict[str, dict[str, Any]]], shape: dict[str, Any] | None = None, **values: Any
) -> InProcessServer:
    """Run requests, each with the parameters of its processors by name."""
    processors = load_processors({name: f"{HERE}:{name}" for name in (*PATHS, *FORMS)})
    server = InProcessServer(load(tiny_model("llama", tmp_path, seed=1)), Shape(processors=processors, **(shape or {})))
    for named in requests:
        texts = {name: json.dumps(parameters) for name, parameters in named.items()}
        server.submit([5, 6, 7], SamplingParams(**{"max_new_tokens": 6} | values, named_processors=texts))
    server.run()
    return server


def test_the_forms_of_the_interface_documents(tmp_path: Path) -> None:
    batch: list[dict[str, dict[str, Any]]] = [{"ForBatch": {"base": base}} for base in (30, 40)]
    server = serve(tmp_path, [{"ForRequest": {"base": 20}}, batch[0], {}, batch[1], {"LikeSGLang": {"token": 3}}])
    tokens = [server.answers[i].tokens for i in range(5)]
    assert tokens[0] == [23, 24, 25, 26, 27, 28]
    assert tokens[1] == [30, 31, 32, 33, 34, 35]
    assert tokens[3] == [40, 41, 42, 43, 44, 45]
    assert tokens[4] == [3] * 6


def test_vllms_form_hears_of_requests_that_come_and_go(tmp_path: Path) -> None:
    """Also of those that are preempted, and where tokens are guessed."""
    wishes: list[dict[str, dict[str, Any]]] = [{"LikeVLLM": {"base": 20 + i}} if i % 3 else {} for i in range(9)]
    shapes: list[dict[str, Any]] = [{"num_blocks": 200}, {"num_blocks": 14}, {"num_blocks": 200, "most_guesses": 3}]
    for shape in shapes:
        server = serve(tmp_path, [*wishes, {"LikeVLLM": {"base": -1}}], shape, max_new_tokens=20)
        for i, wish in enumerate(wishes):
            if wish:
                assert server.answers[i].tokens == [20 + i + 3 + n for n in range(20)]
        assert "'LikeVLLM' refuses its parameters: base must be at least 0" in server.answers[9].error
        assert (server.scheduler.counters["preemptions"] > 0) == (shape["num_blocks"] == 14)


def test_several_of_one_request_run_in_the_operators_order(tmp_path: Path) -> None:
    # Always stands before ForRequest in the registry, whose wish for the same row then counts.
    server = serve(tmp_path, [{"ForRequest": {"base": 20}, "Always": {"token": 3}}])
    assert server.answers[0].tokens == [23, 24, 25, 26, 27, 28]


def test_parameters_are_checked_by_the_schema(tmp_path: Path) -> None:
    server = serve(tmp_path, [{"ForRequest": {}}, {"ForRequest": {"base": 1, "x": 2}}, {"ForRequest": {"base": 20}}])
    assert "parameters of the logits processor 'ForRequest'.base is missing" in server.answers[0].error
    assert "x is not known" in server.answers[1].error
    assert len(server.answers[2].tokens) == 6


def test_one_that_replaces_the_logits_fails_its_request(tmp_path: Path) -> None:
    server = serve(tmp_path, [{"Replacing": {}}, {"ForBatch": {"base": 30}}])
    assert "the logits processor 'Replacing' failed" in server.answers[0].error
    assert server.answers[1].tokens == [30, 31, 32, 33, 34, 35]


@pytest.mark.parametrize(("values", "runs"), [({"temperature": 0}, False), ({"temperature": 0.8, "seed": 1}, True)])
def test_greedy_rows_skip_what_keeps_the_largest_logit(tmp_path: Path, values: dict[str, Any], runs: bool) -> None:
    AddsOne.calls = 0
    server = serve(tmp_path, [{"AddsOne": {}}, {}], **values)
    assert server.answers[0].tokens == server.answers[1].tokens
    assert bool(AddsOne.calls) == runs


def test_a_replayed_row_goes_on_as_it_was(tmp_path: Path) -> None:
    """Few blocks force preemption: rows join again with the tokens that they have emitted."""
    wishes: list[dict[str, dict[str, Any]]] = [
        {"ForRequest": {"base": 20 + i}} if i % 2 else {"ForBatch": {"base": 20 + i}} for i in range(6)
    ]
    values = {"max_new_tokens": 20}
    crowded = serve(tmp_path, wishes, {"num_blocks": 14}, **values)
    roomy = serve(tmp_path, wishes, {"num_blocks": 200}, **values)
    assert crowded.scheduler.counters["preemptions"] > 0
    for i in range(6):
        assert crowded.answers[i].tokens == roomy.answers[i].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_change_nothing(tmp_path: Path, temperature: float) -> None:
    """Rows that see their own history are given the same one where tokens are guessed ahead."""
    wishes: list[dict[str, dict[str, Any]]] = [{"Avoiding": {}}, {"ForBatch": {"base": 20}}]
    values = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    room = {"num_blocks": 34, "block_size": 16}
    plain = serve(tmp_path, wishes, room, **values)
    oracle = Oracle([[5, 6, 7, *answer.tokens] for answer in plain.answers.values()], 0.8, VOCAB, seed=1)
    guessing = serve(tmp_path, wishes, room | {"most_guesses": 3, "drafters": [oracle]}, **values)
    for i in range(len(wishes)):
        assert guessing.answers[i].tokens == plain.answers[i].tokens
    assert sum(engine.counters.accepted for engine in guessing.engines.values()) > 0


def test_entries_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(load_processors([HERE])) == ["of-module", "other"]
    point = metadata.EntryPoint("packaged", f"{HERE}:ForBatch", "tokenyard.logits_processors")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == point.group else [])
    loaded = load_processors(["packaged", f"mine={HERE}:ForRequest", f"{HERE}:Always"])
    assert [processor.form for processor in loaded.values()] == [
        ProcessorForm.BATCH, ProcessorForm.REQUEST, ProcessorForm.LOGITS,
    ]  # fmt: skip
    assert list(loaded) == ["packaged", "mine", f"{HERE}:Always"]
    assert list(load_processors(["installed"])) == ["packaged"]
    with pytest.raises(ValueError, match="two logits processors 'other'"):
        load_processors([HERE, f"other={HERE}:ForBatch"])
    with pytest.raises(ValueError, match=r"json cannot be loaded: .*LOGITS_PROCESSORS"):
        load_processors(["json"])


class BadSchema(ForBatch):
    parameter_schema: ClassVar[dict[str, Any]] = {"type": "object", "patternProperties": {}}


class ThreeArguments:
    def __call__(self, logits: Any, parameters: Any, more: Any) -> Any:
        return logits


@pytest.mark.parametrize(
    ("name", "words"), [("BadSchema", "schema.patternProperties is not supported"), ("ThreeArguments", "takes")]
)
def test_a_class_that_cannot_be_used_is_named(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* {words}".replace(".patternP", r"\.patternP")):
        load_processors([f"{HERE}:{name}"])
