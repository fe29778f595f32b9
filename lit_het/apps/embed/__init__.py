"""``lit-het embed``: stores the embeddings of a locked tower."""
