"""Gemma 3n on our formulas: what Hugging Face's own code computes, outputs and every gradient."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig

import altup
from altup.core import errors
from altup.models.gemma3n.parts import Fused, FusedDecoderLayer
from altup.models.stack import compile_layers
from tests.models.gemma3n.tiny import (
    ROWS,
    accelerated,
    assert_same,
    batch,
    distance,
    gradients,
    plain_batch,
    stir,
    tiny_gemma,
)


@pytest.mark.parametrize(
    ("K", "active", "more"),
    [
        (2, 0, {}),
        (2, 1, {"altup_correct_scale": False}),
        (3, 1, {"altup_coef_clip": 0.2}),
        (4, 0, {"altup_coef_clip": 0.2}),
        (4, 3, {}),
        (8, 5, {"altup_correct_scale": False}),
    ],
)
def test_loss_and_all_gradients(K, active, more):
    model = tiny_gemma(K, active, layers=2, **more)
    before = copy.deepcopy(model.state_dict())
    ours = accelerated(model)
    assert_same(model, ours, batch())
    assert_same(model, accelerated(model, remake=True), batch())
    clipped = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert clipped == ([n for n in before if "prediction_coefs" in n] if "altup_coef_clip" in more else [])
    for name, value in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_without_a_clip():
    model = tiny_gemma(layers=2)
    object.__setattr__(model.config, "altup_coef_clip", None)
    assert_same(model, accelerated(model), batch())


@torch.no_grad()
@pytest.mark.parametrize("K", [2, 4])
def test_logits_and_hidden_states_in_evaluation(K):
    model = tiny_gemma(K, K - 1, altup_coef_clip=0.1, attn_implementation="eager").eval()  # not clipped here
    ours = accelerated(model)
    want = model(**batch(), output_hidden_states=True, output_attentions=True)
    got = ours(**batch(), output_hidden_states=True, output_attentions=True)
    assert distance(got.logits, want.logits) < 1e-5
    assert distance(got.loss, want.loss) < 1e-5
    assert len(got.hidden_states) == len(want.hidden_states)
    assert len(got.attentions) == len(want.attentions) > 0
    for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < 1e-5


@torch.no_grad()
def test_left_padding_and_packed_rows():
    model = tiny_gemma().eval()
    ours = accelerated(model)
    ids = batch(2, 9)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert distance(ours(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits) < 1e-5
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = {"input_ids": ids[:1], "position_ids": places, "use_cache": False}
    assert distance(ours(**packed).logits, model(**packed).logits) < 1e-5
    alone = ours(ids[:1, 4:]).logits
    assert distance(ours(**packed).logits[:, 4:], alone) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_with_padding_and_packed_rows(packed):
    model = tiny_gemma(4, layers=2)
    data = batch(2, 9)
    if packed:
        data["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
        data |= {"attention_mask": None, "use_cache": False}
    else:
        data["attention_mask"][0, :4] = 0
        data["labels"][0, :4] = -100
    assert_same(model, accelerated(model), data)


@torch.no_grad()
def test_token_by_token_with_a_cache_and_generate():
    model = tiny_gemma().eval()
    ours = accelerated(model)
    ids = batch(2, 8)["input_ids"]
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    for i in range(ids.shape[1]):
        step = ours(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        assert distance(step.logits[:, 0], whole[:, i]) < 1e-5
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}):
        made = [
            one.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
            for one in (model, ours)
        ]
        assert torch.equal(*made)


def test_bfloat16_is_no_further_from_float64_than_the_original():
    """In the sum over several models: another rounding moves the error of one by a third, either way."""
    off = {"theirs": 0.0, "ours": 0.0}
    for seed in range(8):
        model = tiny_gemma(4, layers=2)
        torch.manual_seed(seed)
        stir(model)
        model.bfloat16()
        data = batch(4, 9)
        exact_loss, exact = gradients(copy.deepcopy(model).double(), data)
        exact = {name: g for name, g in exact.items() if g is not None}
        for name, one in (("theirs", model), ("ours", accelerated(model))):
            loss, found = gradients(one, data)
            assert abs(loss.double() - exact_loss) < 2e-2 * exact_loss.abs()
            size = sum(g.norm() ** 2 for g in exact.values()) ** 0.5
            off[name] += float(sum((found[n].double() - g).norm() ** 2 for n, g in exact.items()) ** 0.5 / size)
    assert off["ours"] < 1.05 * off["theirs"]


def test_under_autocast():
    model = tiny_gemma(layers=2)
    ours = accelerated(model)
    _, exact = gradients(copy.deepcopy(model).double(), batch())
    off = {}
    for name, one in (("theirs", model), ("ours", ours)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(**batch()).loss
        loss.backward()
        found = {n: p.grad for n, p in one.named_parameters()}
        assert all(g is None or g.dtype == torch.float32 for g in found.values())
        off[name] = sum((found[n] - g).norm() ** 2 for n, g in exact.items() if g is not None) ** 0.5
    assert off["ours"] < 1.05 * off["theirs"]


def test_compiled_additions_are_no_kernels():
    """No GPU has shown them right there."""
    layer = next(m for m in accelerated(tiny_gemma(layers=2)).modules() if isinstance(m, FusedDecoderLayer))
    x = torch.zeros(1, 2, layer.config.hidden_size)
    assert layer.additions_obstacle() is None
    assert torch.compile(lambda x: x + bool(layer.additions_obstacle()), backend="eager")(x).all()


@torch.no_grad()
def test_under_autocast_a_bfloat16_model_stays_one():
    model = tiny_gemma(layers=2).bfloat16().eval()
    ours = accelerated(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = [one(**batch(), output_hidden_states=True).hidden_states for one in (model, ours)]
    assert [s.dtype for s in states[1]] == [s.dtype for s in states[0]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = tiny_gemma(altup_coef_clip=0.2, num_kv_shared_layers=0)
    ours = accelerated(model)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    assert_same(model, ours, batch())


def test_what_a_pass_can_make_again_is_not_kept():
    """The inputs of maps behind norms, and of the gate of the per-layer input; unless someone else decides."""

    def kept(remake=True):
        model = accelerated(tiny_gemma(layers=2), remake=remake)
        layer = model.model.layers[1]
        storages = []
        for part in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.per_layer_input_gate):
            part.register_forward_pre_hook(
                lambda _, given: storages.append(StorageWeakRef(given[0].untyped_storage()))
            )
        loss = model(**batch()).loss
        alive = [not storage.expired() for storage in storages]
        found = []
        for retain in (True, False):  # made again, and once more
            model.zero_grad()
            loss.backward(retain_graph=retain)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        return alive

    assert kept() == [False] * 3
    assert kept(remake=False) == [True] * 3
    with torch.autograd.graph.save_on_cpu():
        assert kept() == [True] * 3


def test_the_loss_is_transformers_own():
    model = tiny_gemma(layers=2)
    ours = accelerated(model)
    data = batch()
    for more in ({}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(7)}):
        torch.testing.assert_close(ours(**data, **more).loss, model(**data, **more).loss, rtol=1e-5, atol=1e-5)
    shifted = torch.randint(3, ROWS, data["labels"].shape)
    both = [one(**data, shift_labels=shifted).loss for one in (ours, model)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(both[0], ours(**data).loss)
    as_tuple = [one(**data, return_dict=False, use_cache=False) for one in (ours, model)]
    assert len(as_tuple[0]) == len(as_tuple[1]) == 2  # loss and logits, as asked
    positional = [
        one(data["input_ids"], data["attention_mask"], labels=data["labels"]).loss for one in (ours, model)
    ]
    torch.testing.assert_close(*positional, rtol=1e-5, atol=1e-5)


def test_logits_are_given_where_someone_may_want_them():
    model = tiny_gemma(layers=2)
    ours = accelerated(model)
    assert ours(**batch()).logits is None
    assert altup.accelerate(ours, implementation="plain", head=False)(**batch()).logits is not None
    altup.accelerate(ours, implementation="plain")
    assert ours(input_ids=batch()["input_ids"]).logits is not None
    with torch.no_grad():
        assert ours(**batch()).logits is not None
    assert ours.eval()(**batch()).logits is not None
    ours.train().lm_head.register_forward_hook(lambda part, given, output: 2 * output)
    assert ours(**batch()).logits is not None


def test_it_goes_back_and_forth(tmp_path):
    model = tiny_gemma(layers=2)
    first = [type(part) for part in model.modules()]
    names, loss = list(model.state_dict()), gradients(model, batch())
    assert altup.accelerate(model, implementation="plain") is model
    once = [type(part) for part in model.modules()]
    altup.accelerate(model, implementation="plain")
    assert [type(part) for part in model.modules()] == once != first
    assert [str(kind) for kind in once] == [str(kind) for kind in first]  # what others ask for by name
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    for again in (Gemma3nForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert [type(part) for part in again.modules()] == first
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    altup.decelerate(altup.decelerate(model))
    assert [type(part) for part in model.modules()] == first
    assert not any({"implementation", "fuses_head", "remakes"} & vars(part).keys() for part in model.modules())
    back = gradients(model, batch())
    assert torch.equal(back[0], loss[0])
    assert all(torch.equal(back[1][name], g) for name, g in loss[1].items() if g is not None)


@torch.no_grad()
def test_copies_and_pickles_are_accelerated_and_their_own():
    ours = accelerated(tiny_gemma(layers=2).eval())
    want = ours(**batch()).logits
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert [type(part) for part in other.modules()] == [type(part) for part in ours.modules()]
        assert torch.equal(other(**batch()).logits, want)
        other.lm_head.weight.zero_()
        assert torch.equal(ours(**batch()).logits, want)


def test_on_a_cpu_it_is_the_original_bit_for_bit_and_says_so_once():
    model = tiny_gemma(layers=2)
    loss, want = gradients(model, batch())
    errors.WARNED.clear()
    with pytest.warns(UserWarning, match="no GPU that Triton supports"):
        ours = accelerated(model, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerated(model, "auto")
    assert any(isinstance(part, Fused) for part in ours.modules())
    our_loss, got = gradients(ours, batch())
    assert torch.equal(our_loss, loss)
    assert all(torch.equal(got[name], g) for name, g in want.items() if g is not None)


@pytest.mark.parametrize(
    "target",
    [
        "altup.modality_router",
        "altup.prediction_coefs",
        "altup.router_norm",
        "post_per_layer_input_norm",
        "input_layernorm",
        "laurel.post_laurel_norm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "self_attn.q_norm",
        "mlp.down_proj",
    ],
)
def test_what_is_hooked_to_a_fused_part_still_works(target):
    model = tiny_gemma(layers=2)
    model.model.layers[1].get_submodule(target).register_forward_hook(lambda part, given, output: 1.5 * output)
    ours = accelerated(model)
    assert_same(model, ours, batch())


def lora(model, targets):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model.train()


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], "all-linear"])
@pytest.mark.parametrize("first", [False, True])
def test_adapters(targets, first):
    """Before or after; on AltUp's own maps too, whose weights the kernels must then not read."""
    pytest.importorskip("peft")
    model = tiny_gemma(layers=2)
    want = lora(copy.deepcopy(model), targets)
    got = accelerated(want) if first else lora(accelerated(model), targets)
    got.load_state_dict(want.state_dict())
    assert any(isinstance(part, Fused) for part in got.modules())
    assert_same(want, got, batch(), tolerance=3e-5)
    trained = [name for name, p in got.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)


def test_under_trainer(tmp_path):
    """With accumulation, where the loss is divided by the labels of all micro-batches; evaluation sees logits."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(3, ROWS, (12, 6), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = tiny_gemma(layers=2)
    losses, predictions = [], []
    for one in (model, accelerated(model)):
        trainer = Trainer(one, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
        predictions.append(torch.tensor(trainer.predict(rows[:4]).predictions))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert len(losses[0]) == 3
    assert distance(predictions[1], predictions[0]) < 2e-2  # AdamW takes a step of one size for any gradient


def test_a_model_that_contains_one():
    model = nn.ModuleDict({"inner": tiny_gemma(layers=2)})
    altup.accelerate(model, implementation="plain")
    assert isinstance(model["inner"], Fused)
    assert isinstance(model["inner"].config, Gemma3nTextConfig)


def test_a_part_that_was_wrapped_is_not_unwrapped():
    """FSDP mixes a class of its own into a part's."""
    ours = accelerated(tiny_gemma(layers=2))
    layer = ours.model.layers[0]
    layer.__class__ = type("FSDPGemma3nTextDecoderLayer", (type(layer),), {})
    with pytest.raises(errors.UserError, match="was wrapped after"):
        altup.decelerate(ours)


def test_wrong_arguments():
    with pytest.raises(errors.UserError, match="implementation='fast'"):
        altup.accelerate(tiny_gemma(layers=2), implementation="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.UserError, match="nothing to accelerate"):
            altup.accelerate(nn.Linear(2, 2))
    for verb in (altup.accelerate, altup.decelerate):
        with pytest.raises(errors.UserError, match=r"altup\.(ac|de)celerate takes a model .*, not None"):
            verb(None)


def test_recorded_calls():
    """On a CPU they are made again. A cache in the result, as transformers has it by default, is launched."""
    model = accelerated(tiny_gemma(layers=2))
    want = [gradients(model, plain_batch(seed)) for seed in range(4)]
    altup.accelerate(model, implementation="plain", record=True)
    calls = model._compiled_call_impl
    for seed, (loss, exact) in enumerate(want):
        our_loss, found = gradients(model, plain_batch(seed))
        assert torch.equal(our_loss, loss)
        assert all(torch.equal(found[name], g) for name, g in exact.items() if g is not None)
    assert len(calls._recorded) == 1
    model(input_ids=plain_batch(0)["input_ids"], use_cache=True)
    assert calls._never
    altup.decelerate(model)
    assert model._compiled_call_impl is None


def test_a_recorded_loop_trains_to_the_same_bits():
    """Gradients are the recording's own: accumulated, clipped in place, or forgotten after a forward pass."""
    trained = []
    for record in (False, True):
        model = accelerated(tiny_gemma(layers=2))
        altup.accelerate(model, implementation="plain", record=record)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for seed in range(10):
            loss = model(**plain_batch(seed, rows=1 + seed // 6)).loss
            if seed % 4 == 1:  # what is left of the step before
                optimizer.zero_grad()
            loss.backward()
            if seed != 3:  # which the next one adds to
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if seed in (0, 2, 7):
                optimizer.zero_grad()
        trained.append([p.detach().clone() for p in model.parameters()] + [p.grad for p in model.parameters()])
        if record:
            assert len(model._compiled_call_impl._recorded) == 2
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_compiled_layers_are_one_graph_each():
    ours = accelerated(tiny_gemma())
    compiled = compile_layers(copy.deepcopy(ours), backend="aot_eager", fullgraph=True)
    data = batch()
    want, got = gradients(ours, data), gradients(compiled, data)
    torch.testing.assert_close(got[0], want[0])
    for name, g in want[1].items():
        if g is not None:
            torch.testing.assert_close(got[1][name], g, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_it_is_the_same():
    model = tiny_gemma(layers=2)
    ours = accelerated(model)
    compiled = copy.deepcopy(ours)
    compiled.compile(backend="aot_eager")
    data = batch()
    want, got = gradients(ours, data), gradients(compiled, data)
    torch.testing.assert_close(got[0], want[0])
    for name, g in want[1].items():
        if g is not None:
            torch.testing.assert_close(got[1][name], g, rtol=1e-4, atol=1e-5)
