"""One line in the loops that people use: Trainer, TRL's SFTTrainer, DDP, FSDP2, recomputed layers, device maps."""

from __future__ import annotations

import copy

import pytest
import torch

import altup
from altup.models.gemma3n.parts import Fused
from tests.models.gemma3n.test_recipes import ALL, adapted, called, case, kinds
from tests.models.gemma3n.tiny import ROWS, accelerated, assert_same, batch, distance, gradients, tiny_gemma

__all__ = ["called", "case"]  # fixtures
LOOP = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
TEXTS = [5, 9, 7, 3, 9, 6, 8, 4, 9, 9, 2, 7]  # their lengths


@pytest.fixture
def one_process(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in [part for part in model.modules() if type(part).__name__ == "Gemma3nTextDecoderLayer"]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_fsdp2_before_and_after(case, called, first, padded):
    model, data = case
    if padded:
        data["attention_mask"][0, -2:] = 0
        data["labels"][0, -2:] = -100
    loss, want = gradients(model, data)
    ours = copy.deepcopy(model)
    if first:
        ours = sharded(altup.accelerate(ours, implementation="plain"))
    else:
        ours = altup.accelerate(sharded(ours), implementation="plain")
    for _ in range(2):  # a second pass through gathered and freed weights
        our_loss, got = gradients(ours, data)
    assert distance(our_loss, loss) < 1e-5
    largest = max(g.norm() for g in want.values() if g is not None)
    for name, gradient in want.items():
        if gradient is not None:
            assert (got[name].full_tensor() - gradient).norm() < 1e-5 * max(gradient.norm(), 1e-2 * largest), name
    assert kinds(called) == ALL
    altup.decelerate(ours)
    assert not any(isinstance(part, Fused) for part in ours.modules())
    assert distance(gradients(ours, data)[0], loss) < 1e-5


@pytest.mark.usefixtures("one_process")
def test_ddp(case, called):
    model, data = case
    want = gradients(model, data)
    wrapped = torch.nn.parallel.DistributedDataParallel(accelerated(model), find_unused_parameters=True)
    loss, got = gradients(wrapped, data)
    assert distance(loss, want[0]) < 1e-5
    for name, gradient in want[1].items():
        if gradient is not None and gradient.norm() > 1e-3:
            assert distance(got[f"module.{name}"], gradient) < 1e-4, name
    assert kinds(called) == ALL


@pytest.mark.parametrize("first", [True, False])
def test_a_device_map(case, called, first):
    """Hooks that move inputs to a part's device leave the kernels on."""
    hooks = pytest.importorskip("accelerate")
    model, data = case
    ours = copy.deepcopy(model)

    def spread(one):
        return hooks.dispatch_model(one, {"": "cpu"}, main_device="cpu", force_hooks=True)

    ours = spread(altup.accelerate(ours, implementation="plain")) if first else accelerated(spread(ours))
    assert all("_hf_hook" in vars(part) for part in ours.modules() if isinstance(part, torch.nn.Linear))
    assert_same(model, ours, data)
    assert kinds(called) == ALL


def rows_of_texts():
    """Rows of several lengths, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, ROWS, (length,), generator=generator).tolist() for length in TEXTS]


def collate(rows):
    """Padded on the right, as transformers' collators do it."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_trainer(tmp_path, called, when, bf16):
    """Accumulation divides the loss by the labels of all micro-batches; layers are recomputed."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=bf16,
        learning_rate=1e-2, disable_tqdm=True, report_to=[], use_cpu=True, **LOOP,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in rows_of_texts()]
    losses = []
    for is_ours in (False, True):
        model = tiny_gemma(layers=2)
        if is_ours and when == "before":
            altup.accelerate(model, implementation="plain")
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
        if is_ours and when == "after":
            altup.accelerate(trainer.model, implementation="plain")
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if bf16 else 1e-4)
    assert kinds(called) == ALL
    assert called["texts"]


@pytest.mark.parametrize("layout", ["padded", "padding_free", "packed"])
@pytest.mark.parametrize("bf16", [False, True])
def test_sft_trainer(tmp_path, called, layout, bf16):
    """LoRA by TRL, whose own head takes the place of altup's; everything behind it runs on kernels."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = tiny_tokenizer()
    layouts = {
        "padded": {},
        "padding_free": {"padding_free": True, "max_length": None},
        "packed": {"packing": True, "max_length": 16},
    }
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), bf16=bf16, learning_rate=1e-2, disable_tqdm=True, use_cpu=True,
        gradient_checkpointing=False, report_to=[], **layouts[layout], **LOOP,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"input_ids": rows_of_texts()})
    losses = []
    for is_ours in (False, True):
        model = adapted(tiny_gemma(layers=2))
        trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        if is_ours:
            altup.accelerate(trainer.model, implementation="plain")
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=3e-2 if bf16 else 1e-3)
    assert kinds(called) == ALL - {"head_sums"}
    assert called["texts"]
    assert altup.explain(trainer.model).as_dict()["loss without logits"][0]["why"] == "it has another forward"


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, ROWS))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_saved_while_accelerated_it_loads_without_altup(tmp_path):
    """Model, adapter and merged model."""
    peft = pytest.importorskip("peft")
    from transformers import Gemma3nForCausalLM

    model = tiny_gemma(layers=2).eval()
    data = {name: value for name, value in batch().items() if name != "labels"}
    ours = accelerated(model)
    ours.save_pretrained(tmp_path / "model")
    wide = adapted(ours).eval()
    wide.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        want = wide(**data).logits
        again = Gemma3nForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert not any(isinstance(part, Fused) for part in again.modules())
        assert distance(again(**data).logits, model(**data).logits) < 1e-5
        assert distance(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")(**data).logits, want) < 1e-5
        wide.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = Gemma3nForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert distance(merged(**data).logits, want) < 1e-4
