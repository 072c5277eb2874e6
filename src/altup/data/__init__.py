"""From text on disk to batches: sources, tokenizer, token shards, objectives, the exact order of the data."""
