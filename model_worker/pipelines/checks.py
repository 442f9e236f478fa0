"""What a text pipeline cannot compute."""

from __future__ import annotations

import numpy as np

from interfaces import MOST_TOP_LOGPROBS, TextAndVisionContext, TextContext


def check_context(context: TextContext, max_length: int, vocab_size: int, has_masks: bool) -> None:
    """ValueError for a context that a pipeline cannot compute, with the value and the remedy."""
    name = str(context.request_id)
    tokens = context.tokens.all
    if not context.is_done and len(tokens) >= max_length:
        raise ValueError(f"request {name} has {len(tokens)} tokens: at most {max_length - 1} leave room for more")
    if isinstance(context, TextAndVisionContext):
        # Their embeddings are replaced.
        tokens = tokens[~np.isin(tokens, context.vision_token_ids)]
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"request {name} has token ids from {low} to {high}: the model has 0 to {vocab_size - 1}")
    for guess in () if context.draft_state is None else context.draft_state.draft_tokens_to_verify:
        if not 0 <= guess < vocab_size:
            raise ValueError(f"request {name} has the guess {guess}: the model has tokens 0 to {vocab_size - 1}")
    if context.grammar is None and context.json_schema is not None:
        raise ValueError(f"request {name} has a schema, which is not compiled: let TextTokenizer make its context")
    if context.grammar is not None and not has_masks:
        raise ValueError(f"request {name} has a grammar: this pipeline was made without masks, for free text only")
    if context.log_probabilities_echo or context.sampling_params.prompt_logprobs_from is not None:
        raise ValueError(f"request {name}: log_probabilities are those of generated tokens only, without echo")
    if not 0 <= context.log_probabilities <= MOST_TOP_LOGPROBS:
        raise ValueError(
            f"request {name}: log_probabilities must be 0 to {MOST_TOP_LOGPROBS}, got {context.log_probabilities}"
        )
    if context.hidden_states or context.prompt_embeddings is not None:
        raise ValueError(f"request {name}: this pipeline takes tokens and gives tokens, no vectors")
