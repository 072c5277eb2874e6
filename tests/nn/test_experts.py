from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from altup import PartialExperts


def one_token_at_a_time(module, x):
    """Route and run every token by itself, in Python."""
    rows = []
    for token in x.flatten(0, -2):
        logits = module.router.weight @ token.to(module.router.weight.dtype)
        exps = torch.exp(logits - logits.max())
        p = exps / exps.sum()
        chosen = sorted(range(len(p)), key=lambda i: -p[i].item())[: module.top_k]
        rows.append(sum(p[i] * (torch.clamp(token @ module.w_in[i], min=0) @ module.w_out[i]) for i in chosen))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("shape", [(1, 1), (2, 17), (3, 64), (1, 200)])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (128, 1), (5, 2), (7, 7)])
def test_routing_against_a_loop(shape, experts, top_k):
    module = PartialExperts(6, experts, hidden=3, top_k=top_k).double().eval()
    torch.nn.init.normal_(module.router.weight)
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    got, want = module(x), one_token_at_a_time(module, x)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(got)
    sources = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad((got * grad).sum(), sources),
        torch.autograd.grad((want * grad).sum(), sources),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_router_learns_through_its_probability():
    module = PartialExperts(4, 8)
    module(torch.randn(3, 10, 4)).square().sum().backward()
    assert module.router.weight.grad.abs().sum() > 0


def test_no_token_is_dropped_when_all_choose_one_expert():
    module = PartialExperts(4, 8, hidden=5).eval()
    torch.nn.init.zeros_(module.router.weight)
    with torch.no_grad():
        module.router.weight[3] = 100.0
    x = torch.rand(1, 300, 4)
    torch.testing.assert_close(module(x), (x @ module.w_in[3]).relu() @ module.w_out[3])


def test_jitter_only_in_training():
    module = PartialExperts(16, 4, jitter=0.5)
    x = torch.randn(2, 50, 16)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_one_token_does_not_depend_on_the_others():
    module = PartialExperts(8, 6, hidden=4).eval()
    x = torch.randn(1, 40, 8)
    changed = x.clone()
    changed[:, 20:] = torch.randn(1, 20, 8)
    torch.testing.assert_close(module(x)[:, :20], module(changed)[:, :20])


def test_cost_of_experts_does_not_grow_with_their_number():
    def flops(experts):
        module = PartialExperts(32, experts).eval()
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(8, 512, 32))
        return counter.get_total_flops() - 2 * 8 * 512 * 32 * experts  # less the router's logits

    needed = 2 * 2 * 8 * 512 * 32 * 16
    assert flops(4) <= 2.2 * needed
    assert flops(512) <= 2.2 * needed


def test_router_stays_float32():
    module = PartialExperts(8, 4).to(torch.bfloat16)
    assert module.router.weight.dtype == torch.float32
    assert module.w_in.dtype == torch.bfloat16
    assert module(torch.randn(2, 3, 8).bfloat16()).dtype == torch.bfloat16


def test_balance_loss_is_one_when_all_are_used_alike():
    module = PartialExperts(4, 4, jitter=0.0, balance=True)
    with torch.no_grad():
        module.router.weight.copy_(torch.eye(4) * 50)
    module(torch.eye(4).repeat(5, 1).unsqueeze(0))
    torch.testing.assert_close(module.balance_loss, torch.tensor(1.0))
    module(torch.eye(4)[:1].repeat(20, 1).unsqueeze(0))
    torch.testing.assert_close(module.balance_loss, torch.tensor(4.0))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": 2, "top_k": 3}, "top_k=3"),
        ({"num_experts": 2, "top_k": 0}, "top_k=0"),
        ({"num_experts": 2, "hidden": 0}, "hidden=0"),
        ({"num_experts": 2, "jitter": 1.5}, "jitter=1.5"),
    ],
)
def test_nonsense_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        PartialExperts(8, **arguments)
