"""What every layer shares: errors, files, names of models, words for people. It imports nothing else of altup."""
