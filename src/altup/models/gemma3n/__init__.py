"""Hugging Face's Gemma 3n, the model with AltUp inside that people run, on our kernels (`altup.accelerate`)."""
