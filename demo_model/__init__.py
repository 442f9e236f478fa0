"""How the embedded model is made: corpus, skills, tokenizer, training, evaluation, model card.

Developers run it from a checkout (`make demo-model`); it is not installed. The weights that it makes are shipped in
`deploy/embedded_model/weights`.
"""
