"""What studies measure: each measure's name in results, and how people read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """`digits` after the point; `higher` says which way is better (None: neither); `paper` its columns there."""

    title: str
    unit: str
    digits: int = 2
    higher: bool | None = True
    paper: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Of a column: the title with its unit, unless it says it itself."""
        return self.title if self.unit in self.title else f"{self.title} ({self.unit})"

    def show(self, value: float) -> str:
        if abs(value) >= 1e6:
            return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")
        return f"{value:,.{self.digits}f}".replace("-", "−")


METRICS: dict[str, Metric] = {
    "accuracy": Metric("held-out accuracy", "%", paper=("pretrain_accuracy", "mlm_accuracy")),
    "loss": Metric("held-out loss", "nats a token", 3, higher=False),
    "glue": Metric("GLUE", "%", paper=("glue",)),
    "superglue": Metric("SuperGLUE", "%", paper=("superglue",)),
    "squad_em": Metric("SQuAD EM", "%", paper=("squad_em",)),
    "squad_f1": Metric("SQuAD F1", "%", paper=("squad_f1",)),
    "triviaqa_em": Metric("TriviaQA EM", "%", paper=("triviaqa_em",)),
    "triviaqa_f1": Metric("TriviaQA F1", "%", paper=("triviaqa_f1",)),
    "relative_speed": Metric("training speed", "× baseline", paper=("relative_speed",)),
    "train_seq_per_s": Metric("sequences a second", "seq/s", 1, paper=("train_speed_examples_per_s_per_core",)),
    "relative_forward": Metric("forward speed", "× baseline"),
    "relative_generate": Metric("generation speed", "× baseline"),
    "forward_ms": Metric("forward pass", "ms a batch", 2, higher=False),
    "generate_ms": Metric("generation", "ms a batch", 1, higher=False),
    "peak_memory": Metric("peak memory in training", "GiB", 2, higher=False),
    "embedding_params": Metric("embedding parameters", "parameters", 0, None, paper=("embedding_params",)),
    "non_embedding_params": Metric("other parameters", "parameters", 0, None, paper=("non_embedding_params",)),
    "flops_train": Metric("training FLOPs", "FLOPs a sequence", 0, higher=False),
    "steps": Metric("steps", "updates", 0, None),
    "train_seconds": Metric("seconds of training, measured", "s", 1, None),
    "planned_seconds": Metric("seconds of training, planned", "s", 1, None),
}
RELATIVE = ("relative_speed", "relative_forward", "relative_generate")
STATIC = ("embedding_params", "non_embedding_params", "flops_train")
# Measures of which the difference to the baseline is worth a number.
GAINS = ("accuracy", "loss", "glue", "superglue", "squad_em", "squad_f1", "triviaqa_em", "triviaqa_f1")


def metric_of_column(column: str) -> str | None:
    """Our measure for a column of the paper's tables."""
    return next((name for name, metric in METRICS.items() if column in metric.paper), None)
