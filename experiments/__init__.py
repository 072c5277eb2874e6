"""Questions about quality: the runs, what they answer, and what makes their tables."""
