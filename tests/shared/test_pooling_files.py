"""What a checkpoint's files say about pooling, in the forms that sentence-transformers has written over the years."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.pair_template import PairTemplate, chat_pair, qwen_template
from shared.pooling_files import PoolingFiles, pooling_modes, task_of
from shared.pooling_modules import PoolingModule

QUERY_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}I={{ m['content'] }};{% elif m['role'] == 'query' %}"
    "Q={{ m['content'] }};{% elif m['role'] == 'document' %}D={{ m['content'] }}{% endif %}{% endfor %}|A:"
)


def checkpoint(path: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def modules(*kinds: str) -> list[dict[str, Any]]:
    """modules.json, under a package's name of old and of new."""
    names = ("sentence_transformers.models.", "sentence_transformers.base.modules.")
    return [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": names[i % 2] + kind}
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("embed", {"modules.json": modules("Transformer", "Pooling", "Normalize")}),
        (
            "embed",
            {"config.json": {"architectures": ["Qwen3ForCausalLM"]}, "modules.json": modules("Transformer", "Pooling")},
        ),
        ("sparse", {"modules.json": modules("MLMTransformer", "SpladePooling")}),
        ("embed_tokens", {"modules.json": modules("Transformer", "Dense")}),
        ("rerank", {"config.json": {"architectures": ["X"]}, "modules.json": modules("Transformer", "LogitScore")}),
        ("generate", {"config.json": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}}),
        ("generate", {"config.json": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}}),
        ("generate", {"config.json": {"model_type": "llama"}}),
        ("embed", {"config.json": {"architectures": ["BertModel"], "model_type": "bert"}}),
        ("embed", {"config.json": {"architectures": ["XLMRobertaForMaskedLM"]}}),
        ("embed", {"config.json": {"model_type": "modernbert"}}),
        ("embed", {"config.json": {"architectures": ["MistralModel"], "model_type": "mistral"}}),
        ("rerank", {"config.json": {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}}),
        ("classify", {"config.json": {"architectures": ["BertForSequenceClassification"]}}),
        ("classify_tokens", {"config.json": {"architectures": ["BertForTokenClassification"]}}),
        # A fine-tuned classifier's class may have stayed in the config of an embedder.
        (
            "embed",
            {
                "config.json": {"architectures": ["BertForSequenceClassification"]},
                "modules.json": modules("Transformer", "Pooling"),
            },
        ),
        (
            "rerank",
            {
                "modules.json": modules("Transformer", "Pooling", "Dense"),
                "2_Dense/config.json": {"out_features": 1, "module_output_name": "scores"},
            },
        ),
        (
            "sparse",
            {
                "config.json": {"architectures": ["BertForMaskedLM"]},
                "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
            },
        ),
    ],
)
def test_the_files_say_what_a_checkpoint_is_for(task: str, files: dict[str, Any], tmp_path: Path) -> None:
    assert task_of(checkpoint(tmp_path, files)) == task
    assert task_of(tmp_path, "generate") == "generate"


def test_an_unknown_task_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task 'embedding' is unknown: use one of auto, generate, embed"):
        task_of(tmp_path, "embedding")


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "mean", "embedding_dimension": 8}, ("mean",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("lasttoken", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False}, ("weightedmean",)),
        ({"word_embedding_dimension": 8}, ("mean",)),
    ],
)
def test_both_forms_of_a_pooling_config_are_read(config: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert pooling_modes(PoolingModule("Pooling", "1_Pooling", config)) == modes


def test_an_unknown_pooling_mode_is_refused_with_its_file() -> None:
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: pooling_mode 'median' is unknown: use one of cls"):
        pooling_modes(PoolingModule("Pooling", "1_Pooling", {"pooling_mode": "median"}))


def test_prompts_and_limits_come_from_the_files(tmp_path: Path) -> None:
    files = PoolingFiles.read(
        checkpoint(
            tmp_path,
            {
                "config.json": {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1},
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
                "config_sentence_transformers.json": {
                    "prompts": {"query": "query: ", "document": ""},
                    "default_prompt_name": "query",
                    "similarity_fn_name": "dot",
                },
                "sentence_bert_config.json": {"max_seq_length": 4096, "do_lower_case": True},
            },
        )
    )
    assert files.prompts == {"query": "query: ", "document": ""}
    assert files.prompt() == files.prompt("query") == "query: "
    assert files.prompt("document") == ""
    with pytest.raises(ValueError, match="prompt_name 'passage' is unknown: this model has query, document"):
        files.prompt("passage")
    assert (files.max_tokens, files.lower_case, files.similarity, files.includes_prompt) == (512, True, "dot", False)


def test_the_tokenizers_own_limit_counts_where_no_other_is_set(tmp_path: Path) -> None:
    config = {"config.json": {"max_position_embeddings": 512}}
    checkpoint(tmp_path, config | {"tokenizer_config.json": {"model_max_length": 384}})
    assert PoolingFiles.read(tmp_path).max_tokens == 384
    checkpoint(tmp_path, {"tokenizer_config.json": {"model_max_length": int(1e30)}})
    assert PoolingFiles.read(tmp_path).max_tokens == 512
    checkpoint(tmp_path, {"config.json": {}})
    assert PoolingFiles.read(tmp_path).max_tokens is None


def test_pylates_prefixes_are_prompts(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"config_sentence_transformers.json": {"query_prefix": "[Q] ", "document_prefix": "[D] "}})
    assert PoolingFiles.read(tmp_path).prompts == {"query": "[Q] ", "document": "[D] "}


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "MultiVectorEncoder", "prompts": {"query": "", "document": None}},
        {"model_type": "MultiVectorEncoder"},
        {"model_type": "ColBERT", "query_prefix": "", "document_prefix": ""},
    ],
)
def test_late_interaction_has_queries_and_documents_without_prompts(values: dict[str, Any], tmp_path: Path) -> None:
    files = PoolingFiles.read(checkpoint(tmp_path, {"config_sentence_transformers.json": values}))
    assert (files.prompt("query"), files.prompt("document"), files.prompt_tokens) == ("", "", [])
    with pytest.raises(ValueError, match="prompt_name 'passage' is unknown: this model has query, document"):
        files.prompt("passage")


def test_broken_files_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"modules.json": "[{"})
    with pytest.raises(ValueError, match=r"modules\.json cannot be read: .*; copy the file again"):
        PoolingFiles.read(tmp_path)


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = {str(i): f"name {i}" for i in range(12)}
    checkpoint(tmp_path, {"config.json": {"id2label": dict(sorted(names.items()))}})
    assert PoolingFiles.read(tmp_path).labels == list(names.values())


def test_qwens_reranker_has_its_published_form(tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"no": 5, "yes": 7}}}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    files = PoolingFiles.read(checkpoint(tmp_path, {"config.json": config, "tokenizer.json": vocabulary}))
    template = files.pair_template
    assert template == qwen_template()
    body = template.body("a {b}", "c")
    assert body == (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: a {b}\n<Document>: c"
    )
    assert template.body("a", "b", "Find").startswith("<Instruct>: Find\n<Query>: a")
    assert template.prefix.endswith("<|im_start|>user\n")
    assert template.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert files.score_tokens == (7, 5)


def test_a_chat_template_with_roles_for_a_pair_gives_the_form(tmp_path: Path) -> None:
    template = chat_pair(QUERY_TEMPLATE)
    assert template == PairTemplate("", "|A:", template.plain, template.instructed) if template else False
    assert template is not None
    assert template.body("what", "that") == "Q=what;D=that"
    assert template.body("what", "that", "be kind") == "I=be kind;Q=what;D=that"
    # The stand-in of the document within a query is text.
    assert template.body(template.plain, "that") == f"Q={template.plain};D=that"
    assert chat_pair("{{ messages[0].content }}") is None
    files = {
        "config.json": {"architectures": ["LlamaForCausalLM"]},
        "modules.json": modules("Transformer", "LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 3},
        "chat_template.jinja": QUERY_TEMPLATE,
    }
    read = PoolingFiles.read(checkpoint(tmp_path, files))
    assert read.pair_template == template
    assert read.score_tokens == (3, None)
