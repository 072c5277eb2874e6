"""What a BERT and a decoder of any method must do: ignore padding and neighbours, learn, and survive the disk."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Trainer,
    TrainingArguments,
)

import altup
from tests.models.helpers import STACKS, VOCABULARY, batch, tiny

AUTO = {
    "bert": (AutoModelForMaskedLM, altup.AltUpBertForMaskedLM, altup.AltUpBertModel),
    "decoder": (AutoModelForCausalLM, altup.AltUpDecoderForCausalLM, altup.AltUpDecoderModel),
}


def is_coefficient(name):
    return any(part in name for part in (".rule.", ".update.", ".router."))


@pytest.mark.parametrize(("family", "method"), STACKS)
class TestEveryMethod:
    @torch.no_grad()
    @pytest.mark.parametrize("more", [1, 8])
    def test_padding_changes_nothing_at_real_positions(self, family, method, more):
        model, data = tiny(family, method), batch(family)
        before = model(**data)
        junk, none = torch.randint(3, VOCABULARY, (3, more)), torch.zeros(3, more, dtype=torch.long)
        after = model(
            input_ids=torch.cat([data["input_ids"], junk], 1),
            attention_mask=torch.cat([data["attention_mask"], none], 1),
            labels=torch.cat([data["labels"], none - 100], 1),
        )
        real = data["attention_mask"].bool()
        torch.testing.assert_close(after.logits[:, :13][real], before.logits[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(after.loss, before.loss, rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_one_row_does_not_see_another(self, family, method):
        model, data = tiny(family, method), batch(family)
        together = model(**data).logits
        for row in range(3):
            alone = model(**{k: v[row : row + 1] for k, v in data.items()}).logits
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_no_mask_is_a_mask_of_ones(self, family, method):
        model, ids = tiny(family, method), batch(family)["input_ids"]
        torch.testing.assert_close(
            model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits, rtol=0, atol=1e-5
        )

    def test_gradients_reach_every_parameter_and_are_the_same_when_checkpointed(self, family, method):
        gradients = []
        for checkpointing in (False, True):
            model = tiny(family, method, expert_jitter=0.0).train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            model(**batch(family)).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        without = [n for n, g in gradients[0].items() if g is None or not g.abs().sum() > 0]
        assert [n for n in without if "experts" not in n] == []  # an expert may be chosen by no token
        for name, want in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], want)

    def test_disk_and_auto_classes(self, family, method, tmp_path):
        auto, whole, stack = AUTO[family]
        model, data = tiny(family, method), batch(family)
        model.save_pretrained(tmp_path)
        saved = AutoConfig.from_pretrained(tmp_path).to_dict()
        assert {**saved, "_name_or_path": ""} == model.config.to_dict()
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is whole
        alone = AutoModel.from_pretrained(tmp_path)
        assert type(alone) is stack
        del data["labels"]
        with torch.no_grad():
            assert torch.equal(loaded(**data).logits, model(**data).logits)
            want = model.base_model(**data).last_hidden_state
            assert torch.equal(alone(**data).last_hidden_state, want)
            assert want.shape == (3, 13, model.config.output_width)

    def test_half_precision_keeps_coefficients_and_agrees(self, family, method, tmp_path):
        model, data = tiny(family, method), batch(family)
        wide = {n: p.clone() for n, p in model.named_parameters() if is_coefficient(n)}
        with torch.no_grad():
            want = model(**data)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cast = model(**data)
            half = model.to(torch.bfloat16)(**data)
        real = data["attention_mask"].bool()
        for got in (cast, half):
            assert got.logits.dtype == torch.bfloat16
            error = (got.logits.float() - want.logits)[real].abs()
            # The median, because a token near a border may change its expert.
            assert error.median() < 0.03 * want.logits[real].std()
        model.save_pretrained(tmp_path)
        for name, parameter in type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters():
            assert parameter.dtype == (torch.float32 if is_coefficient(name) else torch.bfloat16), name
            if name in wide:
                assert torch.equal(parameter, wide[name])


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_dynamic_coefficients(family):
    model, data = tiny(family, "altup", coefficients="dynamic").train(), batch(family)
    model(**data).loss.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if ".rule." in name)


@pytest.mark.parametrize("family", ["bert", "decoder"])
class TestEitherFamily:
    def test_one_block_is_dense(self, family):
        dense, data = tiny(family), batch(family)
        for widening in ("altup", "recycled", "sum", "wide"):
            config = type(dense.config)(**{**dense.config.to_dict(), "widening": widening, "num_blocks": 1})
            model = type(dense)(config).eval()
            model.load_state_dict(dense.state_dict())
            with torch.no_grad():
                assert torch.equal(model(**data).logits, dense(**data).logits)

    def test_loss_pieces_add_up(self, family):
        model, data = tiny(family, "altup", z_loss=0.01), batch(family)
        whole = model(**data, return_logits=False)
        assert whole.logits is None
        counted = data["labels"] if family == "bert" else data["labels"][:, 1:]
        assert whole.num_tokens == (counted != -100).sum()
        torch.testing.assert_close(whole.loss, whole.loss_sum / whole.num_tokens)
        assert whole.loss_sum > whole.nll_sum
        parts = [model(**{k: v[i : i + 1] for k, v in data.items()}) for i in range(3)]
        torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
        torch.testing.assert_close(sum(p.num_correct for p in parts), whole.num_correct)
        torch.testing.assert_close(model(**data, num_items_in_batch=100).loss, whole.loss_sum / 100)

    def test_hidden_states_and_tuples(self, family):
        model, data = tiny(family, "altup"), batch(family)
        output = model(**data, output_hidden_states=True)
        assert [state.shape for state in output.hidden_states] == [(3, 13, 48)] * 5
        assert torch.equal(model(**data, return_dict=False)[1], output.logits)
        with pytest.raises(ValueError, match="output_attentions"):
            model(**data, output_attentions=True)
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model()
        embedded = model(inputs_embeds=model.get_input_embeddings()(data.pop("input_ids")), **data)
        assert torch.equal(embedded.logits, output.logits)

    def test_a_mask_of_another_length_is_refused(self, family):
        data = batch(family)
        mask = data.pop("attention_mask")
        with pytest.raises(ValueError, match="5 long for 13 tokens"):
            tiny(family)(**data, attention_mask=mask[:, :5])
        with pytest.raises(ValueError, match=r"\[3, 13, 13\]"):
            tiny(family)(**data, attention_mask=mask[:, None].expand(-1, 13, -1))

    @torch.no_grad()
    def test_whole_masks(self, family):
        """Masks of queries and keys, of truth or to be added."""
        model, data = tiny(family, "recycled"), batch(family)
        want = model(**data).logits[data["attention_mask"].bool()]
        seen = data["attention_mask"].bool()[:, None, None, :].expand(3, 1, 13, 13)
        if family == "decoder":
            seen = seen & torch.ones(13, 13).tril().bool()
        for mask in (seen, seen.int(), torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
            got = model(**{**data, "attention_mask": mask}).logits[data["attention_mask"].bool()]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    def test_fresh_model_starts_near_the_uniform_guess(self, family):
        for method in ("dense", "altup", "recycled", "sum", "dense-wide", "moe"):
            torch.manual_seed(0)
            shape = {"vocab_size": 1000, "experts": 4 if method == "moe" else None}
            model = type(tiny(family))(type(tiny(family).config).from_preset("tiny", method, **shape))
            ids = torch.randint(0, 1000, (4, 40))
            with torch.no_grad():
                loss = model(input_ids=ids, labels=torch.randint(0, 1000, (4, 40))).loss.item()
            assert 6.7 < loss < 7.5, (method, loss)  # ln 1000 = 6.9

    def test_checkpoint_of_another_shape_is_refused(self, family, tmp_path):
        model = tiny(family, "altup")
        model.save_pretrained(tmp_path)
        other = type(model.config)(**{**model.config.to_dict(), "num_blocks": 4})
        with pytest.raises(ValueError, match=r"num_blocks=4 where the checkpoint has 2"):
            type(model).from_pretrained(tmp_path, config=other)

    def test_tied_weights_are_saved_once_and_stay_tied(self, family, tmp_path):
        model = tiny(family, "altup", tie_word_embeddings=True)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert tiny(family, "altup", tie_word_embeddings=False).num_parameters() > loaded.num_parameters()

    def test_trainer_learns_and_saves(self, family, tmp_path):
        class Counting(torch.utils.data.Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, index):
                ids = (torch.arange(10) + index) % 20 + 3
                labels = ids.clone()
                if family == "bert":
                    ids[4], labels[labels != labels[4]] = 1, -100
                return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

        pytest.importorskip("accelerate")
        model = tiny(family, "altup", initializer_range=0.05).train()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=20,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_steps=20,
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting())
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.8 * before
        prediction = trainer.predict(Counting()).predictions
        assert prediction.shape == (64, 10, VOCABULARY)
        loaded = type(model).from_pretrained(tmp_path / "checkpoint-20")
        data = batch(family)
        with torch.no_grad():
            torch.testing.assert_close(loaded(**data).logits, model.eval()(**data).logits)


@pytest.mark.parametrize(
    ("config", "fields", "says"),
    [
        (
            altup.AltUpBertConfig,
            {"sequence": "pool", "stride": 4},
            "answers for every token",
        ),
        (altup.AltUpBertConfig, {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        (altup.AltUpBertConfig, {"widening": "sum", "num_blocks": 2, "tie_word_embeddings": True}, "tie_word"),
        (altup.AltUpBertConfig, {"sequence": "altup", "stride": 4, "num_layers": 2}, "at least 3 layers"),
        (altup.AltUpBertConfig, {"widening": "altup", "num_blocks": 2, "selection": [0, 1]}, "num_layers=12"),
        (altup.AltUpDecoderConfig, {"sequence": "altup", "stride": 4}, "sequence='altup' shortens"),
        (altup.AltUpDecoderConfig, {"num_kv_heads": 5}, "num_heads=12 is not a multiple of num_kv_heads=5"),
        (altup.AltUpDecoderConfig, {"d_kv": 7}, "d_kv=7 is odd"),
        (altup.AltUpDecoderConfig, {"rope_theta": 0}, "rope_theta=0"),
        (altup.AltUpDecoderConfig, {"attention_dropout": 1}, "attention_dropout=1"),
        (altup.AltUpDecoderConfig, {"extra_layers": -1}, "extra_layers=-1"),
    ],
)
def test_nonsense_gets_an_error_that_names_the_field(config, fields, says):
    with pytest.raises(ValueError, match=says):
        config(**fields)
