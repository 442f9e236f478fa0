"""The skills of the embedded model, one per file: each draws exchanges with true answers and can judge an answer."""
