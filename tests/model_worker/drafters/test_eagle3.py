"""An EAGLE-3 head guesses what its arithmetic in plain torch does, whatever the steps, and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from interfaces import Join, SamplingParams
from model_worker.drafters import eagle3
from model_worker.drafters.base import Proposal
from model_worker.drafters.eagle3 import Eagle3, bytes_of_features
from model_worker.loading.draft import HeadGuesser, share_of
from model_worker.loading.eagle3 import HeadRefused, load_head
from model_worker.model import LoadedModel
from tests.model_worker.drafters.heads import (
    PLAIN,
    SPECULATORS,
    TARGET_HIDDEN,
    PlainHead,
    random_weights,
    write_head,
)
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, load
from tests.system.test_ahead import device_params, greedy_params, host_params
from tests.system.test_drafts import IN_STACK, Asked, check_equal, model_that_goes_round, served
from tests.system.test_sampled_stability import random_params

# The logits of float32 may be so far from those of float64: of two guesses as likely either is right.
NEAR = 1e-3
Proposed = list[tuple[list[int], Proposal]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """All guesses that heads make, with the texts."""
    found: Proposed = []
    plain = Eagle3.propose

    def propose(self: Eagle3, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        proposals = plain(self, texts, most)
        found.extend((texts[row].tolist(), proposal) for row, proposal in proposals.items())
        return proposals

    monkeypatch.setattr(Eagle3, "propose", propose)
    return found


def features_of(loaded: LoadedModel, text: list[int], layers: tuple[int, ...]) -> Tensor:
    """Those of all tokens but the last one, as transformers computes them."""
    model: Any = loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    model.set_attn_implementation(ours)
    return torch.cat([states[layer][0] for layer in layers], -1)


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def check_guesses(proposed: Proposed, loaded: LoadedModel, plain: PlainHead, layers: tuple[int, ...]) -> None:
    for text, proposal in proposed:
        guesses = proposal.tokens.tolist()
        logits = plain.logits(features_of(loaded, text, layers), text, guesses)
        for guess, share, row in zip(guesses, proposal.own.tolist(), logits, strict=True):
            assert float(row.max() - row[guess]) < NEAR
            assert share == pytest.approx(float(row.softmax(-1)[guess]), abs=NEAR)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (PLAIN, {}),
        (SPECULATORS, {}),
        (
            {**PLAIN, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
            {
                **{f"fc_norm__{i}__weight": (TARGET_HIDDEN,) for i in range(2)},
                "input_norm__weight": (2 * TARGET_HIDDEN,),
                "fc__bias": (32,),
                "layers__0__self_attn__o_proj__bias": (32,),
                "layers__0__self_attn__q_proj__bias": (32,),
                "layers__0__self_attn__k_proj__bias": (16,),
                "layers__0__self_attn__v_proj__bias": (16,),
            },
        ),
    ],
)
def test_guesses_are_those_of_the_plain_form(
    config: dict[str, Any], more: dict[str, Any], loaded: LoadedModel, proposed: Proposed, tmp_path: Path
) -> None:
    """With chunks, preemption, replays and wrong guesses."""
    layers = 2 if more else 3
    weights = random_weights(5, layers, **more)
    head = load_head(write_head(tmp_path, weights, config), loaded)
    params = SamplingParams(temperature=0.0, max_new_tokens=30)
    asked: Asked = [(prompt, params, {}) for prompt in random_prompts(random.Random(8), 12)]
    shape = replace(IN_STACK, most_guesses=4, drafters=[], head=head, prefix_cache=False, num_blocks=20)
    server = InProcessServer(loaded, shape)
    served(server, asked)
    assert server.scheduler.counters["preemptions"] > 0
    assert max(len(proposal.tokens) for _, proposal in proposed) > 1
    plain = PlainHead(weights, head.form.norm_before_residual, head.form.norm_output)
    check_guesses(proposed[:: max(1, len(proposed) // 40)], loaded, plain, head.form.layers)


def test_no_guess_of_a_head_changes_an_answer(loaded: LoadedModel, tmp_path: Path) -> None:
    head = load_head(write_head(tmp_path, random_weights(6), PLAIN), loaded)
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    begin = [rng.randrange(3, VOCAB) for _ in range(34)]
    kinds = (greedy_params, device_params, host_params, random_params)
    asked: Asked = [
        ([*(begin if i % 2 else []), *prompt], replace(rng.choice(kinds)(rng), max_new_tokens=rng.randint(10, 40)), {})
        for i, prompt in enumerate(random_prompts(rng, 16))
    ]
    plain = served(InProcessServer(loaded, IN_STACK), asked)
    for learns in (False, True):
        server = InProcessServer(loaded, replace(IN_STACK, most_guesses=7, drafters=[], head=head, learns=learns))
        check_equal(plain, served(server, asked), asked, seed)
        (engine,) = server.engines.values()
        assert engine.counters.drafted > 0 or learns


def perfect_weights(loaded: LoadedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A head for a model whose token says what the next one is: it hands the embedding through to that model's lm_head.

    It sees one entry only, itself; its values are the embedding, and its states add nothing.
    """
    model: Any = loaded.model
    hidden = TARGET_HIDDEN
    weights = random_weights(1, hidden=hidden)
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
        del weights[name]
    unit = torch.eye(hidden)
    attention = "layers.0.self_attn."
    weights[f"{attention}q_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    weights[f"{attention}k_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    weights[f"{attention}v_proj.weight"] = torch.cat([unit, torch.zeros(hidden, hidden)], 1)
    weights[f"{attention}o_proj.weight"] = unit.clone()
    weights["layers.0.input_layernorm.weight"] = torch.ones(hidden)
    weights["layers.0.hidden_norm.weight"] = torch.zeros(hidden)
    weights["layers.0.mlp.down_proj.weight"] = torch.zeros_like(weights["layers.0.mlp.down_proj.weight"])
    weights["norm.weight"] = model.model.norm.weight.detach().clone()
    config = {
        **PLAIN,
        "hidden_size": hidden,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "norm_before_residual": True,
        "layer_types": ["sliding_attention"],
        "sliding_window": 1,
    }
    return weights, config


def test_kept_features_take_no_more_memory_than_is_said(loaded: LoadedModel, tmp_path: Path) -> None:
    """Prompts in chunks, wrong guesses and entries that are computed leave no views of larger arrays."""
    head = load_head(write_head(tmp_path, random_weights(6), PLAIN), loaded, lambda *_: False)
    width = 3 * TARGET_HIDDEN
    most = bytes_of_features(head, 1)
    rng = random.Random(random.randrange(2**31))
    row = eagle3._Row(block_size=16)
    # First the worst of wrong guesses: of 16 features each time, one is right.
    steps = [(0, 1000), *((1000 + i, 16) for i in range(700))]
    end = 1716
    for _ in range(50):
        steps.append((end - rng.randrange(8), rng.choice((1, 9, 16, 300, 512))))
        end = sum(steps[-1])
    for first, count in steps:
        row.add(first, torch.zeros(count, width, dtype=head.dtype))
        if rng.random() < 0.02 and row.end > row.done:
            row.take(min(200, row.end - row.done))
        held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for _, part in row.kept}
        assert sum(held.values()) <= most


def test_kept_features_leave_the_kv_cache_less(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = load_head(write_head(tmp_path, random_weights(6), PLAIN), loaded, lambda *_: False)
    guesser = HeadGuesser(head, str(tmp_path))
    own = loaded.attention.layout.bytes_per_token
    both = own + guesser.layout.bytes_per_token
    kept = 10 * 576 * 3 * TARGET_HIDDEN * head.dtype.itemsize
    with caplog.at_level("INFO"):
        assert share_of(kept + 100 * both, loaded, guesser, rows=10) == 100 * own
    assert f"may keep {kept / 2**20:.1f} MiB of 10 rows" in caplog.text
    with pytest.raises(ValueError, match=r"keeps of 10 rows takes .* raise kv_memory, lower max_running"):
        share_of(kept, loaded, guesser, rows=10)


def test_a_head_that_cannot_run_is_refused_before_it_is_asked(loaded: LoadedModel, tmp_path: Path) -> None:
    """Angles for half of each head pass the loader."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model: Any = loaded.model
    backend = SimpleNamespace(device=torch.device("cpu"), ends=(model.model.embed_tokens, model.lm_head))
    rows = SimpleNamespace(block_size=16)
    shared: Any = SimpleNamespace(backend=backend, rows=rows, sampler=None, watch=lambda *_: None)

    def drafter(name: str, config: dict[str, Any]) -> Eagle3:
        source = write_head(tmp_path / name, random_weights(6), config)
        return HeadGuesser(load_head(source, loaded, lambda *_: False), source).drafter(shared, 4)

    assert drafter("right", PLAIN).name == "eagle3"
    with pytest.raises(HeadRefused, match=f"the EAGLE-3 head {tmp_path / 'wrong'} cannot be used: The size of tensor"):
        drafter("wrong", {**PLAIN, "rope_scaling": rope})


@pytest.mark.parametrize("cached", [True, False])
def test_a_perfect_head_is_always_right(cached: bool, tmp_path: Path) -> None:
    loaded = load(model_that_goes_round(tmp_path / "model"))
    weights, config = perfect_weights(loaded)
    head = load_head(write_head(tmp_path / "head", weights, config), loaded)
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    prompts = [[3 + i, *range(40)] for i in range(6)] + [[*range(40), 3 + i] for i in range(6)]
    asked: Asked = [(prompt, params, {}) for prompt in prompts]
    plain = served(InProcessServer(loaded, IN_STACK), asked)
    shape = replace(IN_STACK, most_guesses=4, drafters=[], head=head, prefix_cache=cached)
    server = InProcessServer(loaded, shape)
    check_equal(plain, served(server, asked), asked, 0)
    (engine,) = server.engines.values()
    assert engine.counters.drafted > 200
    assert engine.counters.accepted == engine.counters.drafted


def test_a_prompt_in_the_cache_keeps_its_entries(
    loaded: LoadedModel, proposed: Proposed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head sees all of a prompt that it has seen before, though the served model does not compute it again."""
    weights = random_weights(7)
    head = load_head(write_head(tmp_path, weights, PLAIN), loaded)
    shape = replace(IN_STACK, most_guesses=4, drafters=[], head=head, num_blocks=64)
    server = InProcessServer(loaded, shape)
    starts: list[int] = []
    joined = Eagle3.joined

    def note(self: Eagle3, join: Join) -> None:
        starts.append(join.start)
        joined(self, join)

    monkeypatch.setattr(Eagle3, "joined", note)
    prompt = [3, *[9, 8, 7] * 20]
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    served(server, [(prompt, params, {})])
    proposed.clear()
    served(server, [(prompt, params, {})])
    assert starts[0] == 0
    assert starts[1] >= 32
    assert proposed
    check_guesses(proposed, loaded, PlainHead(weights), head.form.layers)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_features_are_kept_in_order(data: st.DataObject) -> None:
    """Passes over the next tokens, some of them over wrong guesses; a token's features are its index."""
    size = data.draw(st.sampled_from([4, 16]))
    row = eagle3._Row(size)
    right = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle3, "KEPT_FEATURES", 4 * size)
        for _ in range(data.draw(st.integers(1, 12))):
            right += data.draw(st.sampled_from([0, 0, 0, 5]))
            count = data.draw(st.integers(1, 6 * size))
            guesses = data.draw(st.integers(0, 3))
            index = torch.arange(right, right + count + guesses)
            row.add(right, torch.where(index < right + count, index, -1)[:, None].float())
            right += count
            assert row.base % size == 0
            assert row.base <= row.done
            due = min(row.end, right) - row.done
            assert row.end - row.done <= 4 * size
            assert due > 0 or row.done >= right
            taken = data.draw(st.integers(0, max(0, due)))
            done = row.done
            if taken:
                assert row.take(taken)[:, 0].tolist() == list(range(done, done + taken))
            assert row.done == done + taken


def test_features_of_the_sequence_before_are_forgotten() -> None:
    """Its last pass may end after another sequence has come into the row."""
    for late in (3, 40):
        row = eagle3._Row(16)
        row.add(late, torch.full((2, 1), -1.0))
        row.add(0, torch.arange(20)[:, None].float())
        assert (row.base, row.done, row.end) == (0, 0, 20)
        assert row.take(20)[:, 0].tolist() == list(range(20))
