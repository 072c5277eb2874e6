"""From text on disk to batches: sources, tokenizer, token shards, objectives, the exact order of the data."""

# The parts of held-out text: every sequence, or every other one. What is chosen on the part "tuning" is reported
# on "reporting". Here, because the command line's help names them and should not load what batches are made with.
HELD_OUT_PARTS = {"all": slice(None), "tuning": slice(0, None, 2), "reporting": slice(1, None, 2)}

RAW_LENGTH = 568  # tokens of text in a T5's sequence, of which spans are cut so that 512 are left
