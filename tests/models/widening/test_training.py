"""Widened models train: gradients, checkpointing, Hugging Face's Trainer, adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from altup import WideTrainerMixin, describe, load_widened, narrow, parameter_groups, widen
from altup.core.errors import UserError
from tests.models.widening.families import FAMILIES, build, inputs


def train(model, steps, rate=1e-2):
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), rate, weight_decay=0.0)
    torch.manual_seed(0)
    batch = inputs(model)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def stacks_of(wide):
    return [list(wide.get_submodule(name)) for name in wide.config.altup["stacks"]]


def blocks_before_the_last_layer(wide):
    """The K blocks that enter each stack's last layer."""
    found = []
    handles = [
        layers[-1].register_forward_pre_hook(lambda module, args: found.append(args[: module.place.num_blocks]))
        for layers in stacks_of(wide)
    ]
    with torch.no_grad():
        wide(**inputs(wide))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(("method", "num_blocks"), [("recycled", 2), ("altup", 3), ("sameup", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_coefficient_and_blocks_part(family, method, num_blocks):
    wide = widen(build(family), method, num_blocks)
    for blocks in blocks_before_the_last_layer(wide):
        assert all(torch.allclose(blocks[0], block, atol=1e-5) for block in blocks)
    wide(**inputs(wide)).loss.backward()
    for name, parameter in wide.named_parameters():
        if ".altup." in name:
            assert (parameter.grad != 0).all(), name
        elif ".k_proj.bias" not in name and ".key.bias" not in name:
            assert not parameter.requires_grad or parameter.grad is not None, name
    losses = train(wide, 20)
    assert losses[-1] < losses[0]
    for blocks in blocks_before_the_last_layer(wide):
        for i in range(num_blocks):
            for j in range(i):
                assert (blocks[i] - blocks[j]).norm() > 1e-3 * blocks[i].norm(), (i, j)


@pytest.mark.parametrize("family", ["bert", "vit", "whisper"])
def test_gradients_against_finite_differences(family):
    """Of the loss with respect to one coefficient of each kind, in float64 (which RMS norms do not keep)."""
    wide = widen(build(family).double(), "altup", 3).double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in inputs(wide).items()}
    for layers in stacks_of(wide):
        for parameter, index in ((layers[1].altup.P, (2, 1)), (layers[1].altup.g, (0,))):
            assert parameter.dtype == torch.float64
            wide.zero_grad()
            wide(**batch).loss.backward()
            losses = []
            with torch.no_grad():
                for step in (1e-5, -2e-5):
                    parameter[index] += step
                    losses.append(wide(**batch).loss.item())
                parameter[index] += 1e-5
            slope = (losses[0] - losses[1]) / 2e-5
            assert parameter.grad[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5", "bert", "gpt2", "vit", "whisper"])
def test_checkpointing_gives_the_same_gradients(family, reentrant):
    wide = widen(build(family), "altup", 3)
    other = copy.deepcopy(wide)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other.enable_input_require_grads()
    batch = inputs(wide)
    for model in (wide, other):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("dropout", "activation_dropout", "attention_dropout", "dropout_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        model.train()(**batch).loss.backward()
    for (name, ours), theirs in zip(other.named_parameters(), wide.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_sharded_layers_give_the_same_gradients(method, tmp_path):
    """FSDP2, which gathers a layer's parameters, coefficients too, for the time of its call."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wide = widen(build("llama"), method, 3)
    sharded = copy.deepcopy(wide)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        batch = inputs(wide)
        for model in (wide, sharded):
            model(**batch).loss.backward()
        for (name, theirs), ours in zip(wide.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
    finally:
        distributed.destroy_process_group()


class Adapter(nn.Module):
    """What PEFT does to a linear map: the frozen map beside a trained one of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapt(model):
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "v_proj", "lm_head")):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapter(module))


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_adapters_by_hand(method):
    model = build("llama")
    wide = widen(copy.deepcopy(model), method)
    adapt(wide)
    batch = inputs(model)
    torch.testing.assert_close(wide(**batch).logits, model(**batch).logits, rtol=0, atol=1e-5)
    frozen = {n: p.clone() for n, p in wide.named_parameters() if not p.requires_grad}
    losses = train(wide, 10)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in wide.named_parameters() if n in frozen)


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_peft(method, tmp_path):
    """LoRA beside trained coefficients: it learns, comes back from disk, and merges into a plain widened model."""
    peft = pytest.importorskip("peft")
    wide = widen(build("llama"), method)
    batch = inputs(wide)
    before = wide(**batch).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["altup"])
    model = peft.get_peft_model(wide, config)
    torch.testing.assert_close(model(**batch).logits, before, rtol=0, atol=1e-5)
    losses = train(model, 10)
    assert losses[-1] < losses[0]
    trained = model(**batch).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(widen(build("llama"), method), tmp_path)
    torch.testing.assert_close(again(**batch).logits, trained)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, trained, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_merged_adapters_are_saved_beside_an_untied_head(family, tmp_path):
    """PEFT then says in the config that nothing is tied, which is true of the head and not of BERT's biases."""
    peft = pytest.importorskip("peft")
    wide = widen(build(family), "altup")
    target = {"bert": "query", "gpt2": "c_attn"}[family]
    model = peft.get_peft_model(
        wide, peft.LoraConfig(r=2, target_modules=[target], fan_in_fan_out=family == "gpt2")
    )
    with pytest.raises(UserError, match="take it out of what wraps it"):
        narrow(model)
    train(model, 2)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded, batch = load_widened(tmp_path), inputs(wide)
    torch.testing.assert_close(loaded(**batch).logits, merged(**batch).logits)
    assert loaded.get_input_embeddings().weight is not loaded.get_output_embeddings().weight


class Counting(torch.utils.data.Dataset):
    """Rows that count upwards by one."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(8) + 3 + index
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_trainer_learns_saves_and_resumes(method, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    wide = widen(build("llama"), method)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=16,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        save_steps=10,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=wide, args=arguments, train_dataset=Counting(), eval_dataset=Counting())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    batch = inputs(wide)
    with torch.no_grad():
        expected = wide.eval()(**batch).logits
        loaded = load_widened(tmp_path / "checkpoint-20")
        torch.testing.assert_close(loaded(**batch).logits, expected)
        resumed = Trainer(model=widen(build("llama"), method), args=arguments, train_dataset=Counting())
        with torch.enable_grad():
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
        torch.testing.assert_close(resumed.model.eval()(**batch).logits, expected, rtol=1e-3, atol=1e-4)


def test_coefficients_have_a_rate_of_their_own_and_no_decay():
    wide = widen(build("llama"), "altup")
    wide.lm_head.weight.requires_grad = False
    groups = parameter_groups(wide, lr=1e-4, weight_decay=0.1, coefficient_factor=30)
    found = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found)
    for name, p in wide.named_parameters():
        expected = (3e-3, 0.0) if ".altup." in name else (1e-4, 0.1 if p.ndim > 1 else 0.0)
        assert found.get(p) == (pytest.approx(expected) if p.requires_grad else None), name
    torch.optim.AdamW(groups).step()
    assert [group["lr"] for group in parameter_groups(build("llama"), lr=0.5)] == [0.5, 0.5]
    for lr, rate in ((1e-5, 1e-4), (2e-3, 1e-2), (0.05, 0.05)):  # 0.01 at most, unless all else has more
        assert parameter_groups(wide, lr=lr)[-1]["lr"] == pytest.approx(rate)
    with pytest.raises(UserError, match="coefficient_factor"):
        parameter_groups(wide, lr=1e-4, coefficient_factor=-1)


def trainer_for(wide, folder, base=(), **arguments):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{name: value[0] for name, value in inputs(wide).items()} for _ in range(4)]
    settings = {"learning_rate": 1e-4, "weight_decay": 0.1, "max_steps": 3, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(str(folder), **{**settings, "save_strategy": "no", **arguments})
    return type("WideTrainer", (*base, Trainer), {})(wide, arguments, train_dataset=rows)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_the_mixin_does_it_under_trainer(optimizer, tmp_path, recwarn):
    wide = widen(build("llama"), "recycled")
    trainer = trainer_for(wide, tmp_path, (WideTrainerMixin,), optim=optimizer)
    trainer.train()
    assert not [warning for warning in recwarn if "altup" in str(warning.message)]
    for group in trainer.optimizer.param_groups:
        names = [name for name, p in wide.named_parameters() if any(p is q for q in group["params"])]
        if any(".altup." in name for name in names):
            assert all(".altup." in name for name in names)
            assert (group["initial_lr"], group["weight_decay"]) == (pytest.approx(1e-3), 0.0)
        else:
            assert group["initial_lr"] == 1e-4
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(wide.parameters()))


def test_a_decay_of_coefficients_is_told_once(tmp_path):
    wide = widen(build("llama"), "recycled")
    with pytest.warns(UserWarning, match=r"parameter_groups.*WideTrainerMixin") as told:
        trainer_for(wide, tmp_path).train()
    assert len([warning for warning in told if "weight decay" in str(warning.message)]) == 1


def test_a_description_names_what_is_wide():
    wide = widen(build("llama"), "altup", 2)
    told = describe(wide)
    coefficients = sum(p.numel() for name, p in wide.named_parameters() if ".altup." in name)
    assert told.startswith("LlamaForCausalLM, widened by altup, K = 2\n")
    assert "model.layers:" in told
    assert "lm_head.weight" in told
    assert f"coefficients: {coefficients} of {sum(p.numel() for p in wide.parameters()):,} parameters" in told
    assert "not widened" in describe(build("llama"))
