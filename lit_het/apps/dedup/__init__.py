"""``lit-het data dedup``: near-duplicates within shards and against evaluation sets, by stored embeddings."""
