"""The dialect of text-embeddings-inference (TEI): vectors, sparse vectors, scores and labels of texts."""
