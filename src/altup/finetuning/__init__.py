"""Fine-tuning: joins tasks, the training loop and evaluation."""
