"""What a checkpoint's JSON files say about pooling: its task, its modules, its prompts and how texts become tokens.

Reads config.json, the files of sentence-transformers (modules.json and those that it names) and tokenizer_config.json.
Knows neither torch nor transformers' models, so that the API server reads the same facts as the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.encoder_types import ENCODERS, POSITIONS_BEHIND_PADDING
from shared.gguf.format import is_gguf
from shared.late_interaction import LateInteraction, late_interaction
from shared.pair_template import PairTemplate, chat_pair, qwen_template
from shared.pixel_files import is_pipeline, tokenizer_folder
from shared.pooling_modules import (
    Modules,
    PoolingModule,
    file_of,
    join,
    object_of,
    path_of_transformer,
    read_modules,
)
from shared.pooling_routes import STATIC

# What a server does with a checkpoint: generate text, or one task of pooling, or speak, or paint.
TASKS = ("generate", "embed", "embed_tokens", "sparse", "rerank", "classify", "classify_tokens", "speak", "paint")
# Model types that make sound of a text in one pass.
SPEAKING = ("vits",)

# Ends of the names of architectures, and the task of a checkpoint with such a head.
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")
_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining", "Encoder")
# What sentence-transformers calls a model whose files do not show it otherwise.
_TASK_OF_MODEL_TYPE = {"SparseEncoder": "sparse", "MultiVectorEncoder": "embed_tokens", "ColBERT": "embed_tokens"}
# The class of Stanford's ColBERT: BERT and a linear layer, named linear.
COLBERT = "HF_ColBERT"

# Older names of pooling modes in 1_Pooling/config.json, in the order in which their vectors are joined.
_OLD_POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_OLD_POOLING_MODES.values())

# Lengths above this in tokenizer_config.json say that there is no limit.
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class PoolingFiles:
    """The facts of one checkpoint. `modules` are empty where there is no modules.json.

    `routes` are the modules of texts of certain kinds ("query", "document"), where a Router chooses among modules; then
    `modules` are those of other texts.
    """

    source: str
    config: Mapping[str, Any]
    modules: Modules = ()
    routes: Mapping[str, Modules] = field(default_factory=dict)
    sentence_transformers: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    # Whether it is a pipeline of diffusers, which has its models in folders (pixel_files.py).
    is_pipeline: bool = False

    @classmethod
    def read(cls, source: str | Path) -> PoolingFiles:
        """Read a directory or hub name, or a GGUF file. ValueError names the file that is broken or lacks something."""
        if is_gguf(source):
            # numpy comes with it, and few processes that want a task have a GGUF file.
            from shared.gguf.config import config_of
            from shared.gguf.file import open_gguf

            return cls(source=str(source), config=config_of(open_gguf(source)))
        found, routes = read_modules(source)
        root = path_of_transformer(found, routes)
        config = object_of(source, join(root, "config.json"))
        return cls(
            source=str(source),
            config=config,
            modules=found,
            routes=routes,
            sentence_transformers=object_of(source, "config_sentence_transformers.json"),
            transformer=object_of(source, join(root, "sentence_bert_config.json")),
            tokenizer_config=object_of(source, join(root, "tokenizer_config.json")),
            is_pipeline=not config and is_pipeline(source),
        )

    @property
    def architecture(self) -> str:
        """The checkpoint's class in transformers, or its model type where the config names no class."""
        return str((self.config.get("architectures") or [self.config.get("model_type", "")])[0])

    @property
    def transformer_path(self) -> str:
        """The folder of the transformer within the checkpoint; empty for the root."""
        return path_of_transformer(self.modules, self.routes)

    @property
    def tokenizer_source(self) -> str:
        """The folder or hub name with the tokenizer's files: the checkpoint's own, or the transformer's folder."""
        if self.is_pipeline:
            return tokenizer_folder(self.source)
        path = file_of(self.source, join(self.transformer_path, "tokenizer.json")) if self.transformer_path else None
        return self.source if path is None else str(path.parent)

    @property
    def task(self) -> str:
        """The member of TASKS that the checkpoint was made for."""
        if self.is_pipeline:
            return "paint"
        if self.config.get("model_type") in SPEAKING:
            return "speak"
        architecture = self.architecture
        model_type = str(self.sentence_transformers.get("model_type", ""))
        kinds = [module.kind for module in self.modules]
        if "SpladePooling" in kinds or model_type == "SparseEncoder":
            return "sparse"
        if "LogitScore" in kinds:
            return "rerank"
        if scores := [int(module.config.get("out_features", 1)) for module in self.score_modules]:
            return "rerank" if scores[-1] == 1 else "classify"
        if "Pooling" in kinds:
            return "embed"
        if architecture == COLBERT:
            return "embed_tokens"
        if architecture.endswith("ForSequenceClassification"):
            return "rerank" if len(self.labels) == 1 else "classify"
        if architecture.endswith("ForTokenClassification"):
            return "classify_tokens"
        if "Dense" in kinds or "MultiVectorMask" in kinds:
            return "embed_tokens"
        if model_type in _TASK_OF_MODEL_TYPE:
            return _TASK_OF_MODEL_TYPE[model_type]
        if model_type:
            return "rerank" if model_type == "CrossEncoder" else "embed"
        if architecture.endswith(_GENERATING):
            return "generate"
        named = bool(self.config.get("architectures"))
        encoder = self.config.get("model_type") in ENCODERS
        # A model without a head cannot generate.
        headless = named and architecture.endswith(
            ("Model", "ForMaskedLM", "ForPreTraining", "Encoder", "EncoderModel")
        )
        return "embed" if headless or encoder else "generate"

    @property
    def frame_tokens(self) -> tuple[list[int], list[int]]:
        """The ids of the tokens that begin and end a text, as far as the tokenizer's files name them."""
        return self.token_ids("cls_token", "bos_token")[:1], self.token_ids("sep_token", "eos_token")[:1]

    def token_ids(self, *names: str) -> list[int]:
        """Return the ids of the tokens that tokenizer_config.json has under these names, as far as there are such."""
        contents = [_content(self.tokenizer_config.get(name)) for name in names]
        return [self._added_tokens[content] for content in contents if content in self._added_tokens]

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        added = object_of(self.source, join(self.transformer_path, "tokenizer.json")).get("added_tokens", [])
        return {token["content"]: int(token["id"]) for token in added}

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's outputs, in order."""
        names = self.config.get("id2label")
        if isinstance(names, dict) and names:
            return [str(names[key]) for key in sorted(names, key=int)]
        return [f"LABEL_{i}" for i in range(int(self.config.get("num_labels", 2)))]

    @property
    def multi_label(self) -> bool:
        """Whether each label of a classifier has a probability of its own."""
        return self.config.get("problem_type") == "multi_label_classification"

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a text, special tokens included; None where the files set no limit."""
        asked = self.transformer.get("max_seq_length") or self.tokenizer_config.get("model_max_length")
        limits = [self._positions]
        if isinstance(asked, int | float) and 0 < asked < _MOST_TOKENS:
            # PyLate sets it for each kind of text, and saves what it was for the last one.
            own = self.late_interaction
            limits.append(max(int(asked), 0 if own is None else own.longest))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def lower_case(self) -> bool:
        """Whether texts are lower-cased before they are tokenized."""
        return bool(self.transformer.get("do_lower_case"))

    @property
    def prompts(self) -> dict[str, str]:
        """Texts to put before an input, by name ("query", "document"). They may be empty: late interaction has queries
        and documents also where nothing is put before them."""
        prompts = self.sentence_transformers.get("prompts") or {}
        if not isinstance(prompts, dict):
            raise ValueError(f"prompts of {self.source} must be an object of texts by name, got {prompts!r:.80}")
        found = {str(name): str(text or "") for name, text in prompts.items()}
        for name, key, usual in (("query", "query", "[unused0]"), ("document", "doc", "[unused1]")):
            prefix = self.sentence_transformers.get(f"{name}_prefix")
            if prefix:
                found[name] = f"{prefix}{found.get(name, '').removeprefix(str(prefix))}"
            elif self.architecture == COLBERT and not found.get(name):
                found[name] = f"{self._artifact.get(f'{key}_token_id') or usual} "
            elif self.late_interaction is not None:
                found.setdefault(name, "")
        # A route is chosen by the name of its prompt.
        return {**dict.fromkeys(self.routes, ""), **found}

    @property
    def prompt_tokens(self) -> list[str]:
        """Tokens of the vocabulary that prompts consist of, which a tokenizer might take apart otherwise."""
        names = (f"{name}_prefix" in self.sentence_transformers for name in self.prompts)
        words = [text.split(None, 1)[0] for text in self.prompts.values() if text.strip()]
        return words if any(names) or self._artifact else []

    @cached_property
    def late_interaction(self) -> LateInteraction | None:
        """How queries and documents are read for late interaction; None for other models. ValueError for a file that
        says what cannot be."""
        if self.task != "embed_tokens":
            return None
        mask = next((module.config for module in self.of_kind("MultiVectorMask")), {})
        return late_interaction(self.transformer, mask, self.sentence_transformers, self._artifact)

    @cached_property
    def _artifact(self) -> dict[str, Any]:
        """What Stanford's ColBERT writes beside a checkpoint; its usual values where that file is missing."""
        if self.architecture != COLBERT:
            return {}
        return object_of(self.source, "artifact.metadata") or {"query_token_id": "[unused0]"}

    @property
    def default_prompt_name(self) -> str | None:
        """The prompt of inputs for which none is named."""
        name = self.sentence_transformers.get("default_prompt_name")
        return str(name) if name else None

    def prompt(self, name: str | None = None) -> str:
        """Return the text to put before an input; without a name the default prompt's. ValueError for a name that the
        checkpoint does not have."""
        chosen = name or self.default_prompt_name
        if chosen is None:
            return ""
        if chosen not in self.prompts and name is not None:
            known = ", ".join(self.prompts) or "none at all"
            raise ValueError(f"prompt_name {name!r} is unknown: this model has {known}")
        return self.prompts.get(chosen, "")

    def route(self, prompt_name: str | None) -> str:
        """Return the kind of texts with this prompt, where a Router has modules for it; empty for the usual modules."""
        kind = prompt_name or self.default_prompt_name or ""
        return kind if kind in self.routes else ""

    def is_static(self, route: str) -> bool:
        """Whether texts of this kind go through no transformer, and have no tokens around them."""
        return any(module.kind == STATIC for module in self.routes.get(route, ()))

    @property
    def includes_prompt(self) -> bool:
        """Whether pooling counts the tokens of the prompt, too."""
        return all(bool(module.config.get("include_prompt", True)) for module in self.of_kind("Pooling"))

    @property
    def similarity(self) -> str:
        """How vectors are compared: cosine, dot, euclidean or manhattan."""
        return str(self.sentence_transformers.get("similarity_fn_name") or "cosine")

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """How a query and a document become the text of a decoder that reranks; None where the tokenizer joins them."""
        if not self.architecture.endswith(_GENERATING):
            return None
        found = chat_pair(self._chat_template)
        if found is None and str(self.config.get("model_type", "")).startswith("qwen3"):
            return qwen_template()
        return found

    @property
    def _chat_template(self) -> str:
        path = file_of(self.source, join(self.transformer_path, "chat_template.jinja"))
        if path is not None:
            return path.read_text(encoding="utf-8")
        template = self.tokenizer_config.get("chat_template")
        return template if isinstance(template, str) else ""

    @cached_property
    def score_tokens(self) -> tuple[int, int | None]:
        """The ids of the tokens for yes and no, whose logits are a decoder's score. ValueError if it has none."""
        for module in self.of_kind("LogitScore"):
            false = module.config.get("false_token_id")
            return int(module.config["true_token_id"]), None if false is None else int(false)
        vocabulary = object_of(self.source, "tokenizer.json").get("model", {}).get("vocab", {})
        if not isinstance(vocabulary, dict) or "yes" not in vocabulary or "no" not in vocabulary:
            raise ValueError(
                f"task rerank: {self.source} has neither a LogitScore module nor the tokens 'yes' and 'no': "
                "serve a reranker, or use task generate"
            )
        return int(vocabulary["yes"]), int(vocabulary["no"])

    @property
    def score_modules(self) -> list[PoolingModule]:
        """The Dense modules of a cross-encoder whose scores come from a pooled vector."""
        return [module for module in self.of_kind("Dense") if module.config.get("module_output_name") == "scores"]

    def of_kind(self, kind: str) -> list[PoolingModule]:
        """Return the modules of one kind, in order."""
        return [module for module in self.modules if module.kind == kind]

    @property
    def _positions(self) -> int | None:
        """Positions that the model has embeddings or frequencies for."""
        positions = self.config.get("max_position_embeddings")
        if not isinstance(positions, int) or positions <= 0:
            return None
        if self.config.get("model_type") in POSITIONS_BEHIND_PADDING:
            padding = self.config.get("pad_token_id")
            return positions - (1 if padding is None else int(padding)) - 1
        return positions


def task_of(source: str | Path, task: str = "auto") -> str:
    """Return the member of TASKS that a server of this checkpoint has: `task` itself, or with auto the checkpoint's
    own. ValueError for an unknown task."""
    if task == "auto":
        return PoolingFiles.read(source).task
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown: use one of auto, {', '.join(TASKS)}")
    if task != "generate" and is_gguf(source):
        raise ValueError(f"task {task!r}: {source} is a GGUF file, and these generate text only; use task generate")
    return task


def pooling_modes(module: PoolingModule) -> tuple[str, ...]:
    """Return the modes of a Pooling module, whose vectors are joined in this order. ValueError for an unknown mode."""
    config = module.config
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_POOLING_MODES.items() if config.get(name)] or ["mean"]
    found = (modes,) if isinstance(modes, str) else tuple(str(mode) for mode in modes)
    for mode in found:
        if mode not in POOLING_MODES:
            raise ValueError(
                f"{module.path}/config.json: pooling_mode {mode!r} is unknown: use one of {', '.join(POOLING_MODES)}"
            )
    return found


def _content(token: Any) -> str:
    """The text of a token of tokenizer_config.json, which has it as a string or as an object."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)
