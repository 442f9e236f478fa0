"""EAGLE-3 heads are read in their published formats; what does not fit the served model is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.loading.eagle3 import HeadRefused, is_head, load_head
from model_worker.model import LoadedModel
from tests.model_worker.drafters.heads import (
    DRAFT_VOCAB,
    HIDDEN,
    PLAIN,
    SPECULATORS,
    TARGET_HIDDEN,
    random_weights,
    write_head,
)
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import load


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("model")))


def test_both_formats_give_the_same_head(loaded: LoadedModel, tmp_path: Path) -> None:
    weights = random_weights(1)
    plain = write_head(tmp_path / "plain", weights, {**PLAIN, "norm_before_residual": True})
    wrapped = write_head(tmp_path / "speculators", weights, SPECULATORS)
    named = {"model." + name: weight for name, weight in weights.items()}
    prefixed = write_head(tmp_path / "prefixed", named, {**PLAIN, "norm_before_residual": True})
    assert is_head(plain)
    assert is_head(wrapped)
    heads = [load_head(source, loaded, lambda *_: False) for source in (plain, wrapped, prefixed)]
    assert heads[0].form == heads[1].form == heads[2].form
    assert heads[0].form.layers == (2, 1, 0)
    assert heads[0].form.norm_before_residual
    for head in heads:
        for name, weight in head.state_dict().items():
            assert torch.equal(weight, weights[name])
        assert head.targets.tolist() == weights["t2d"].nonzero()[:, 0].tolist()


def test_a_model_is_no_head(loaded: LoadedModel, tmp_path: Path) -> None:
    assert not is_head(str(tiny_model("llama", tmp_path)))
    assert not is_head(str(tmp_path / "nothing"))


def test_the_first_published_heads_are_known_by_their_vocabulary(loaded: LoadedModel, tmp_path: Path) -> None:
    """Their configs name a plain Llama model, and may have the served model's number of layers."""
    weights = random_weights(1, hidden=TARGET_HIDDEN)
    del weights["embed_tokens.weight"]
    config = {**PLAIN, "architectures": ["LlamaForCausalLM"], "hidden_size": TARGET_HIDDEN, "num_hidden_layers": 40}
    source = write_head(tmp_path, weights, config)
    assert is_head(source)
    head = load_head(source, loaded, lambda *_: False)
    assert head.form.layers == (2, 1, 0)
    assert head.embed_tokens is None
    assert torch.equal(head.state_dict()["fc.weight"], weights["fc.weight"])


def test_numbers_of_layers_mean_what_their_format_says(loaded: LoadedModel, tmp_path: Path) -> None:
    two = random_weights(1, layers=2)
    top = {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [1, 3]}
    nested = {**PLAIN, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}}
    for i, config in enumerate((top, nested)):
        head = load_head(write_head(tmp_path / str(i), two, config), loaded, lambda *_: False)
        assert head.form.layers == (1, 3)


def test_a_head_takes_what_it_lacks_from_the_model(loaded: LoadedModel, tmp_path: Path) -> None:
    weights = random_weights(1, hidden=TARGET_HIDDEN, fc__bias=(TARGET_HIDDEN,))
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
        del weights[name]
    config = {**PLAIN, "hidden_size": TARGET_HIDDEN}
    head = load_head(write_head(tmp_path, weights, config), loaded, lambda *_: False)
    assert head.embed_tokens is None
    assert head.lm_head is None
    assert head.targets.tolist() == list(range(VOCAB))


def changed(**changes: Any) -> dict[str, Tensor]:
    weights = random_weights(1) | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in weights.items() if value is not None}


def heads(count: int, kv_count: int, dim: int) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": kv_count, "head_dim": dim, "hidden_size": 48}


def with_heads(count: int, kv_count: int, dim: int) -> dict[str, Tensor]:
    """The weights that such a config wants."""
    shapes = {"q_proj": (count * dim, 96), "k_proj": (kv_count * dim, 96), "v_proj": (kv_count * dim, 96)}
    shapes["o_proj"] = (48, count * dim)
    named: dict[str, Any] = {f"layers__0__self_attn__{name}__weight": shape for name, shape in shapes.items()}
    return random_weights(1, hidden=48, **named)


@pytest.mark.parametrize(
    ("weights", "config", "complaint"),
    [
        (changed(norm__weight=None), PLAIN, "it has no tensor norm.weight: download it anew"),
        (changed(fc__weight=None), PLAIN, "it has no tensor fc.weight"),
        (changed(d2t=None), PLAIN, "it has no tensor d2t"),
        (
            changed(fc__weight=torch.ones(HIDDEN, 30)),
            PLAIN,
            r"its fc.weight is 32 x 30, where .* want 32 x 144",
        ),
        (changed(layers__1__q=torch.ones(2)), PLAIN, r"a tensor layers.1.q, which heads of one layer"),
        (changed(d2t=torch.full((DRAFT_VOCAB,), VOCAB)), PLAIN, "it guesses tokens from 193 to 292, and the served"),
        (changed(d2t=torch.zeros(3)), PLAIN, r"its d2t has the shape \(3,\)"),
        (changed(norm__weight=torch.ones(HIDDEN, dtype=torch.int8)), PLAIN, "quantized heads are not supported"),
        (changed(norm__weight=torch.full((HIDDEN,), torch.nan)), PLAIN, "norm.weight has values that are not finite"),
        (changed(norm__weight=torch.ones(3)), PLAIN, r"its norm.weight has the shape \(3,\), and its config"),
        (changed(embed_tokens__weight=None), PLAIN, "it has no embed_tokens.weight, and the served model's is 48 wide"),
        (changed(), {**SPECULATORS, "speculators_model_type": "dflash"}, "speculators_model_type 'dflash'"),
        (changed(), {**PLAIN, "eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        (changed(), {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"the layers \[1, 2, 9\]"),
        (changed(), {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"the layers \[1, 1, 2\]"),
        (changed(), {**PLAIN, "hidden_size": None}, "config.json has no hidden_size"),
        (
            changed(lm_head__weight=torch.tensor(1.0)),
            PLAIN,
            r"its lm_head.weight has the shape \(\), and should have two",
        ),
        (changed(fc__weight=torch.ones(HIDDEN)), PLAIN, r"its fc.weight has the shape \(32,\), and should have two"),
        (with_heads(6, 4, 8), {**PLAIN, **heads(6, 4, 8)}, "num_attention_heads 6, and num_key_value_heads 4 does not"),
        (
            with_heads(4, 2, 7),
            {**PLAIN, **heads(4, 2, 7)},
            "config.json has head_dim 7, and positions want an even one",
        ),
        (changed(), {**SPECULATORS, "transformer_layer_config": 3}, "transformer_layer_config 3"),
    ],
)
def test_what_does_not_fit_is_refused(
    weights: dict[str, Tensor], config: dict[str, Any], complaint: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    source = write_head(tmp_path, weights, config)
    with pytest.raises(HeadRefused, match=f"draft: the EAGLE-3 head {source} cannot be used: .*{complaint}"):
        load_head(source, loaded, lambda *_: False)


def test_pickles_are_never_read(loaded: LoadedModel, tmp_path: Path) -> None:
    source = write_head(tmp_path, random_weights(1), PLAIN)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadRefused, match="only pickles"):
        load_head(source, loaded, lambda *_: False)
