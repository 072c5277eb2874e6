"""Our models under Hugging Face's own trainers."""

from __future__ import annotations

import pytest
import torch

import altup
from altup import AltUpT5ForConditionalGeneration
from tests.models.helpers import batch, tiny, tiny_t5

pytest.importorskip("accelerate")

from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)


class CopyTask(torch.utils.data.Dataset):
    """Repeat the first three tokens of the input."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 20, (8,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:3]}


@pytest.mark.parametrize("method", ["altup", "altup+sequence-altup+moe"])
def test_trainer_learns_evaluates_saves_and_resumes(method, tmp_path):
    model = tiny_t5(method).train()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        logging_steps=10,
        save_steps=15,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=CopyTask(), eval_dataset=CopyTask())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.8 * before
    prediction = trainer.predict(CopyTask()).predictions
    logits = prediction[0] if isinstance(prediction, tuple) else prediction
    assert logits.shape == (64, 3, model.config.vocab_size)
    loaded = AltUpT5ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-30")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch()).logits, model.eval()(**batch()).logits)
    resumed = Trainer(model=tiny_t5(method).train(), args=arguments, train_dataset=CopyTask())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert resumed.state.global_step == 30


def test_seq2seq_trainer_generates(tmp_path):
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        predict_with_generate=True,
        generation_max_length=5,
        report_to=[],
        use_cpu=True,
    )
    trainer = Seq2SeqTrainer(
        model=tiny_t5("recycled"), args=arguments, train_dataset=CopyTask(), eval_dataset=CopyTask()
    )
    trainer.train()
    assert trainer.predict(CopyTask()).predictions.shape[0] == 64


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_smoothed_labels_are_those_of_the_plain_loss(family, tmp_path):
    """Trainer computes this loss itself, and has to shift a decoder's labels as the decoder does."""
    model, data = tiny(family, "altup"), batch(family)
    losses = {}
    for smoothing in (0.0, 1e-9):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), label_smoothing_factor=smoothing, report_to=[], use_cpu=True
        )
        losses[smoothing] = Trainer(model=model, args=arguments).compute_loss(model, dict(data))
    torch.testing.assert_close(losses[1e-9], losses[0.0])


def test_trainer_replays_an_accelerated_model_to_the_same_weights(tmp_path, recwarn):
    """On a CPU calls are made again instead of replayed; accumulation and evaluation included."""
    weights = []
    for accelerated in (False, True):
        model = tiny_t5("altup", dropout_rate=0.0).train()
        if accelerated:
            altup.accelerate(model, record=True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        Trainer(model=model, args=arguments, train_dataset=CopyTask(), eval_dataset=CopyTask()).train()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert len(model._compiled_call_impl._recorded) == 2  # training and evaluation
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
