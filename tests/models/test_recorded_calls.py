"""Recorded calls compute what the model does: here made again, in `test_recorded_calls_gpu.py` replayed."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch

import altup
from altup.models.recorded_calls import LAUNCHED, MOST_TRAINED, RecordedCalls, _Recorded, stand_ins
from tests.models.helpers import VOCABULARY, tiny, tiny_t5


def batches(number, rows=(2,)):
    generator = torch.Generator().manual_seed(0)
    for i in range(number):
        shape = (rows[i % len(rows)], 6)
        ids, labels = (torch.randint(3, VOCABULARY, shape, generator=generator) for _ in range(2))
        yield {"input_ids": ids, "labels": labels}


def recorded(model):
    return altup.accelerate(model, record=True)


def recordings(model):
    return model._compiled_call_impl._recorded


@pytest.fixture
def pair(recwarn):
    model = tiny_t5("altup", dropout_rate=0.0).train()
    return model, recorded(copy.deepcopy(model))


def test_a_loop_with_accumulation_and_two_shapes_trains_to_the_same_bits(pair):
    for model in pair:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number, inputs in enumerate(batches(16, rows=(2, 3))):
            (model(**inputs).loss / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    plain, ours = pair
    assert len(recordings(ours)) == 2
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_results_outlive_the_next_call(pair):
    _, model = pair
    kept = [model(**inputs).loss for inputs in batches(LAUNCHED + 3)]
    for loss in kept:
        loss.backward()
    again = [model(**inputs).loss for inputs in batches(LAUNCHED + 3)]
    assert [float(loss) for loss in kept] == [float(loss) for loss in again]


def test_two_forward_passes_before_their_backward_passes(pair):
    """The second one is launched: the graph holds one pass's activations."""
    for model in pair:
        for inputs in batches(LAUNCHED + 1):
            model(**inputs).loss.backward()
        model.zero_grad()
        first, second = (model(**inputs).loss for inputs in batches(2))
        second.backward()
        (3 * first).backward()
    assert recordings(pair[1])
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_every_output_has_its_gradient(pair):
    for model in pair:
        for inputs in batches(LAUNCHED + 2):
            model.zero_grad()
            output = model(**inputs)
            (output.loss + output.encoder_last_hidden_state.square().mean()).backward()
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_second_backward_pass_is_refused(pair):
    _, model = pair
    for inputs in batches(LAUNCHED + 1):
        loss = model(**inputs).loss
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="record=False"):
        loss.backward()


def test_frozen_and_replaced_weights_are_recorded_anew(pair):
    for model in pair:
        for inputs in batches(LAUNCHED + 1):
            model(**inputs).loss.backward()
        model.zero_grad()
        model.lm_head.weight.requires_grad_(False)
        model.encoder.embed_tokens.weight = torch.nn.Parameter(model.encoder.embed_tokens.weight * 2)
        for inputs in batches(LAUNCHED + 1):
            model(**inputs).loss.backward()
    assert pair[1].lm_head.weight.grad is None
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("family", ["decoder", "bert"])
def test_evaluation_and_calls_with_a_cache(family, recwarn):
    model = tiny(family, "altup").eval()
    want = [model(input_ids=inputs["input_ids"]) for inputs in batches(4)]
    recorded(model)
    with torch.no_grad():
        got = [model(input_ids=inputs["input_ids"]) for inputs in batches(4)]
    for one, other in zip(want, got, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.logits, other.logits)
    caches = [output.get("past_key_values") for output in got]
    assert bool(recordings(model)) == (family == "bert")
    assert (caches[0] is None) == (family == "bert")


def test_hooks_are_called_every_time(pair):
    _, model = pair
    calls = []
    for inputs in batches(LAUNCHED + 1):
        model(**inputs)
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    for inputs in batches(4):
        model(**inputs)
    assert len(calls) == 4


def test_logits_are_left_out_in_training_only(pair):
    plain, model = pair
    inputs = next(batches(1))
    assert model(**inputs).logits is None
    assert model(**inputs, return_logits=True).logits is not None
    assert model.eval()(**inputs).logits is not None
    altup.decelerate(model)
    assert model.train()(**inputs).logits is not None
    assert plain(**inputs).logits is not None


def test_recordings_without_gradients_leave_training_alone(recwarn):
    model = tiny_t5("altup").train()
    model._compiled_call_impl = RecordedCalls(model, with_gradients=False)
    for inputs in batches(LAUNCHED + 2):
        model(**inputs).loss.backward()
    assert not recordings(model)
    with torch.no_grad():
        for inputs in batches(LAUNCHED + 2):
            model(**inputs)
    assert len(recordings(model)) == 1


class Unrecordable(torch.nn.Module):
    """A model whose calls fail while they are recorded."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        if _Recorded.running:
            raise self.error
        return self.weight * x


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a number is asked for")])
def test_what_cannot_be_recorded_is_launched(error, recwarn):
    model = Unrecordable(error)
    model._compiled_call_impl = RecordedCalls(model)
    for number in range(LAUNCHED + 3):
        model(torch.full((3,), float(number))).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((3,), float(sum(range(LAUNCHED + 3)))))
    assert not recordings(model)
    assert [str(error) in str(warning.message) for warning in recwarn] == [True]


def test_few_kinds_of_training_are_recorded_as_each_holds_all_gradients(pair):
    _, model = pair
    for rows in range(1, MOST_TRAINED + 3):
        for inputs in batches(LAUNCHED + 1):
            model(**{name: tensor[:1].repeat(rows, 1) for name, tensor in inputs.items()}).loss.backward()
    assert len(recordings(model)) == MOST_TRAINED
    with torch.no_grad():
        for inputs in batches(LAUNCHED + 1):
            model(**inputs)
    assert len(recordings(model)) == MOST_TRAINED + 1


def test_the_encoder_is_recorded_apart_for_generate(pair):
    plain, model = (one.eval() for one in pair)
    for inputs in batches(LAUNCHED + 2):
        want, got = (one.generate(inputs["input_ids"], max_new_tokens=3) for one in (plain, model))
        assert torch.equal(want, got)
    assert len(recordings(model.encoder)) == 1
    assert not recordings(model)
    altup.decelerate(model)
    assert model.encoder._compiled_call_impl is None


def test_stand_ins_share_memory_and_nothing_of_autograd():
    """A loss that is still held must not be tied to what is recorded; the model has its own weights afterwards."""
    model = tiny_t5("altup")
    model.lm_head.weight = model.encoder.embed_tokens.weight
    before = dict(model.named_parameters(remove_duplicate=False))
    with stand_ins(model) as others:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert parameter is others[before[name]]
            assert parameter is not before[name]
            assert parameter.data_ptr() == before[name].data_ptr()
        assert model.lm_head.weight is model.encoder.embed_tokens.weight
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_recorded_model_inside_another(pair):
    """As an adapter's: the inner one's calls are part of what the outer one records."""
    plain, model = pair
    outer = torch.nn.Sequential(OrderedDict(model=model))
    outer.forward = lambda **inputs: model(**inputs)
    outer._compiled_call_impl = RecordedCalls(outer, with_gradients=True)
    for inputs in batches(LAUNCHED + 2):
        model(**inputs).loss.backward()
    for inputs in batches(LAUNCHED + 2):
        for one in (plain, outer):
            one.zero_grad()
            one(**inputs).loss.backward()
    assert recordings(outer)
    for one, other in zip(plain.parameters(), outer.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    altup.decelerate(outer)
    assert outer._compiled_call_impl is None
    assert model._compiled_call_impl is None


def test_accelerating_again_takes_the_new_options(pair):
    _, model = pair
    inputs = next(batches(1))
    assert altup.accelerate(model, record=True, head=False)(**inputs).logits is not None
    calls = model._compiled_call_impl
    assert altup.accelerate(model, record=True, head=False)._compiled_call_impl is calls
    assert altup.accelerate(model, record=False)._compiled_call_impl is None


def test_a_copy_is_not_recorded(pair):
    assert isinstance(pair[1]._compiled_call_impl, RecordedCalls)
    assert copy.deepcopy(pair[1])._compiled_call_impl is None
