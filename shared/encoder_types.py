"""Model types of encoders, as config.json names them."""

from __future__ import annotations

# Model types that are encoders, for configs that name no architecture.
ENCODERS = frozenset(
    [
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "gte",
        "jina_embeddings_v3",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    ]
)

# Model types whose positions begin behind the padding token's id.
POSITIONS_BEHIND_PADDING = frozenset(
    [
        "camembert",
        "data2vec-text",
        "longformer",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
