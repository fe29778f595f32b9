"""From data sets as they are published to shards: one module a source, `dataset` between them and the `writer`."""
