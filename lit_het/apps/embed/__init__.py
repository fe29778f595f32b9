"""``lit-het embed``: stores the embeddings of a locked tower."""

TRANSFORMERS = "transformers:"
"""Before the folder or address of a model that PyTorch computes, see `lit_het.apps.embed.torch_tower`."""
