"""`altup pretrain`: train a T5, BERT or decoder by its own objective on prepared data."""

from __future__ import annotations

from typing import Any

from altup.cli.options import ConfigFile, Out, PushToHub, Resume, tell, with_settings
from altup.training.pretraining import PretrainConfig


@with_settings(PretrainConfig)
def command(
    out: Out,
    resume: Resume = False,
    config: ConfigFile = None,
    push_to_hub: PushToHub = None,
    **settings: Any,
) -> None:
    """Pretrain a model: t5 by span corruption, bert by masked and decoder by causal language modelling.

    --from MODEL starts from a trained one, of any class of transformers, widened or not.

    Stop it with Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: it saves (exit code 75) and continues with --resume.

    Several processes: torchrun --nproc-per-node 8 -m altup pretrain …
    """
    from altup.core.console import outlive_stdout
    from altup.training.pretraining import example_command, pretrain
    from altup.training.run_folder import RunFolder

    outlive_stdout()
    resolved = PretrainConfig.resolve(RunFolder(out).saved_settings(resume), config, settings)
    outcome = pretrain(resolved, out, resume, push_to_hub)
    example = example_command(RunFolder(out).read_config(PretrainConfig).kind, out)
    tell(outcome, "pretrain", out, f"the model is in {out / 'final'}. Try it:\n  {example}")
