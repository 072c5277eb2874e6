"""The counts against the models themselves, torch's counter, what autograd keeps, and the paper's tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from altup.core.errors import UserError
from altup.models import AltUpBertConfig, AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.models.accounting import account, refuse_too_large
from altup.models.base import ALIGNED
from altup.models.config import AltUpConfig
from altup.models.families import family as family_of
from altup.models.methods import list_presets
from altup.studies.paper import table
from tests.models.helpers import STACKS

SHAPES: list[dict[str, Any]] = [
    *({"size": size, "method": method} for size in ("tiny", "small") for method in list_presets()),
    {"size": "tiny", "method": "altup", "k": 1},
    {"size": "tiny", "method": "altup", "k": 5},
    {"size": "tiny", "method": "altup", "sites": "sublayer"},
    {"size": "tiny", "method": "recycled", "k": 3, "sites": "sublayer"},
    {"size": "tiny", "method": "recycled+sequence-altup+moe", "k": 3, "stride": 3, "experts": 6},
    {"size": "tiny", "method": "sum", "k": 4, "vocab_size": 501},
    {"size": "tiny", "method": "recycled", "tie_word_embeddings": True},
    {"size": "tiny", "method": "altup+average-pooling", "num_layers": 3, "num_decoder_layers": 5},
    {"size": "tiny", "method": "sequence-altup", "num_layers": 3, "num_decoder_layers": 1},
    {"size": "tiny", "method": "moe", "expert_hidden": 7, "expert_top_k": 3, "experts": 5, "extra_layers": 2},
    {"size": "tiny", "method": "dense-wide", "k": 3, "num_heads": 3, "relative_attention_num_buckets": 20},
]
ids = [" ".join(f"{name}={value}" for name, value in shape.items()) for shape in SHAPES]


def config_of(family: str, method: str, **fields: Any) -> AltUpConfig:
    experts = 6 if "moe" in method else None
    shape = {"vocab_size": 500, **fields}
    return family_of(family).config_class.from_preset("tiny", method, experts=experts, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_counts_of_t5_equal_those_of_the_model_itself(shape: dict[str, Any]) -> None:
    compare_with_the_model("t5", AltUpT5Config.from_preset(**shape))


@pytest.mark.parametrize("tied", [False, None])
@pytest.mark.parametrize(("family", "method"), STACKS)
def test_counts_equal_those_of_the_model_itself(family: str, method: str, tied: bool | None) -> None:
    fields = {} if tied is None else {"tie_word_embeddings": tied}
    compare_with_the_model(family, config_of(family, method, **fields))


def compare_with_the_model(family: str, config: AltUpConfig) -> None:
    with torch.device("meta"):
        model = family_of(family).model_class(config)
    model.tie_weights()
    count = account(config)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.embedding == sum(p.numel() for p in tables)
    assert count.parameters["norms"] == sum(p.numel() for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize(
    "row", table("parameters_and_speed"), ids=lambda row: f"{row['model']}-{row['method']}-{row['k']}"
)
def test_the_papers_parameter_tables(row: dict[str, Any]) -> None:
    count = account(AltUpT5Config.from_preset(row["model"], row["method"], k=row["k"]))
    assert f"{count.embedding:.2e}" == f"{row['embedding_params']:.2e}"
    if (row["method"], row["k"]) == ("dense-wide", 2):
        assert f"{count.non_embedding:.3e}" == "3.965e+08"  # the paper rounds it to 3.97
    else:
        assert f"{count.non_embedding:.2e}" == f"{row['non_embedding_params']:.2e}"


@pytest.mark.parametrize(
    ("size", "extra"), [("small", "19.6 %"), ("base", "14.2 %"), ("large", "12.1 %"), ("xl", "12.4 %")]
)
def test_extra_products_of_altup_come_from_wide_cross_attention_and_head(size: str, extra: str) -> None:
    dense = account(AltUpT5Config.from_preset(size, "dense"))
    altup = account(AltUpT5Config.from_preset(size, "altup", k=2))
    assert f"{100 * (altup.flops_matrix / dense.flops_matrix - 1):.1f} %" == extra
    changed = {part for part in dense.flops if dense.flops[part] != altup.flops[part]}
    assert changed == {"cross_attention_projections", "output_head", "update_rule"}
    assert altup.flops["update_rule"] < 0.001 * altup.flops_forward


@pytest.mark.parametrize("shape", [s for s in SHAPES if "moe" not in s["method"] and s["size"] == "tiny"])
@pytest.mark.parametrize(("inputs", "targets"), [(130, 57), (37, 5)])
def test_flops_equal_the_products_that_torch_counts(shape: dict[str, Any], inputs: int, targets: int) -> None:
    config = AltUpT5Config.from_preset(**{"vocab_size": 500, **shape})
    # In bfloat16 the rule is element-wise; in float32 on a CPU it is a matrix product, and would be counted.
    model = AltUpT5ForConditionalGeneration(config).bfloat16()
    ids, labels = (torch.zeros(1, length, dtype=torch.long) for length in (inputs, targets))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, labels=labels)
    assert account(config, inputs, targets).flops_matrix == counter.get_total_flops()


@pytest.mark.parametrize(("family", "method"), [stack for stack in STACKS if "moe" not in stack[1]])
def test_flops_of_one_stack_equal_the_products_that_torch_counts(family: str, method: str) -> None:
    config = config_of(family, method)
    # In bfloat16 the rule is element-wise; in float32 on a CPU it is a matrix product, and would be counted.
    model, ids = family_of(family).model_class(config).bfloat16(), torch.zeros(1, 37, dtype=torch.long)
    asked = {"masked_positions": torch.arange(5).unsqueeze(0), "return_logits": False} if family == "bert" else {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, labels=ids, **asked)
    targets = 5 if family == "bert" else None
    bias = 2 * 5 * ALIGNED * 500 if family == "bert" else 0  # the columns that carry the bias of the logits
    assert account(config, 37, targets).flops_matrix == counter.get_total_flops() - bias


def test_targets() -> None:
    bert, decoder = config_of("bert", "dense"), config_of("decoder", "dense")
    assert (account(bert, 512).targets, account(decoder, 512).targets) == (77, 512)
    assert account(decoder, 512, 114).targets == 512
    with pytest.raises(ValueError, match="targets=0"):
        account(bert, 512, 0)


def test_experts_cost_their_router_and_the_chosen_ones_only() -> None:
    few = account(AltUpT5Config.from_preset("small", "moe", experts=8))
    many = account(AltUpT5Config.from_preset("small", "moe", experts=128))
    tokens, layers, d, hidden = 512 + 114, 4, 512, 16
    assert many.flops["experts"] - few.flops["experts"] == 2 * tokens * layers * d * (128 - 8)
    assert few.flops["experts"] == 2 * tokens * layers * (d * 8 + 2 * d * hidden)
    both = account(AltUpT5Config.from_preset("small", "moe", experts=8, expert_top_k=2))
    assert both.flops["experts"] - few.flops["experts"] == 2 * tokens * layers * 2 * d * hidden


def test_rule_costs_by_hand() -> None:
    method, fields = "altup+sequence-altup", {"k": 3, "stride": 4}
    rules = account(AltUpT5Config.from_preset("small", method, **fields), 100, 10)
    blocks = 2 * (9 + 3) * 512 * (4 * 100 + 4 * 10)  # 4 encoder and 4 decoder layers
    tokens = 2 * 3 * 512 * (2 * 100)  # the 2 inner encoder layers
    assert rules.flops["update_rule"] == blocks + tokens
    assert rules.flops_train == 3 * rules.flops_forward
    fixed = account(AltUpT5Config.from_preset("small", method, coefficients="fixed", **fields), 100, 10)
    assert fixed.flops["update_rule"] == tokens
    assert fixed.parameters["coefficients"] == 2 * 3
    assert fixed.flops_matrix == rules.flops_matrix


def layer_from_torchs_own_parts(x: Tensor, config: AltUpConfig, weights: set[int]) -> Tensor:
    """One layer of fused operations; a layer norm stands in for an RMS norm, equal heads for shared ones."""
    width, inner = config.layer_width, config.num_heads * config.d_kv

    def project(x: Tensor, out: int) -> Tensor:
        weight = torch.randn(out, x.shape[-1], dtype=x.dtype, requires_grad=True)
        weights.add(weight.untyped_storage().data_ptr())
        return F.linear(x, weight)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,))

    def attend(x: Tensor) -> Tensor:
        q, k, v = (project(x, inner).unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for _ in range(3))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = F.scaled_dot_product_attention(q, k, v)
        return project(mixed.transpose(1, 2).flatten(2), width)

    if isinstance(config, AltUpBertConfig):
        x = norm(x + attend(x))
        return norm(x + project(F.gelu(project(x, config.d_ff)), width))
    x = x + attend(norm(x))
    normed = norm(x)
    activation = F.gelu if isinstance(config, AltUpT5Config) else F.silu
    return x + project(activation(project(normed, config.d_ff)) * project(normed, config.d_ff), width)


def kept_bytes(config: AltUpConfig, tokens: int) -> int:
    """What autograd really keeps for two layers and the rule between and after them."""
    K = config.num_blocks
    state = torch.randn(K, 1, tokens, config.layer_width, dtype=torch.bfloat16, requires_grad=True)
    storages: dict[int, Tensor] = {}
    weights: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in range(2):
            y = layer_from_torchs_own_parts(state[layer % K], config, weights)
            if K == 1:
                state = y.unsqueeze(0)
                continue
            M = torch.randn(K, K, dtype=torch.bfloat16, requires_grad=True)
            g = torch.randn(K, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
            state = (M @ state.reshape(K, -1)).view(state.shape) + g * y
    return sum(t.untyped_storage().nbytes() for place, t in storages.items() if place not in weights)


@pytest.mark.parametrize("family", ["t5", "bert", "decoder"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_activations_equal_what_autograd_keeps_of_two_more_layers(family: str, k: int) -> None:
    fields = {"t5": {"num_decoder_layers": 1}, "bert": {}, "decoder": {"num_kv_heads": 4}}[family]

    def config(layers: int) -> AltUpConfig:
        return config_of(family, "recycled", num_layers=layers, num_blocks=k, **fields)

    two_more = account(config(4), 96, 1).activation_bytes - account(config(2), 96, 1).activation_bytes
    assert two_more == pytest.approx(kept_bytes(config(4), 96), rel=0.01)


def test_activation_formula_of_the_paper() -> None:
    s, t, h, L, a = 512, 114, 768, 12, 12
    dense = account(AltUpT5Config.from_preset("base", "dense")).activation_bytes_paper
    altup = account(AltUpT5Config.from_preset("base", "altup", k=2)).activation_bytes_paper
    assert dense == sum(n * h * L * (34 + 5 * a * n / h) for n in (s, t))
    assert altup - dense == 3 * (s + t) * h * L
    assert account(AltUpT5Config.from_preset("base", "altup", k=1)).activation_bytes_paper == dense


def test_shorter_sequences_cost_less_in_the_order_of_the_papers_speeds() -> None:
    costs = [
        account(AltUpT5Config.from_preset("base", method)).flops_forward
        for method in ("average-pooling", "stride-and-skip", "sequence-altup", "dense")
    ]
    assert costs == sorted(costs)
    assert len(set(costs)) == 4


@pytest.mark.parametrize(("inputs", "targets", "name"), [(0, 114, "inputs"), (512, -1, "targets")])
def test_lengths_that_make_no_sense(inputs: int, targets: int, name: str) -> None:
    with pytest.raises(UserError, match=name):
        account(AltUpT5Config.from_preset("tiny"), inputs, targets)


def test_a_model_that_does_not_fit_is_refused_before_it_is_built() -> None:
    refuse_too_large(AltUpT5Config.from_preset("base"))
    with pytest.raises(UserError, match=r"parameters: [\d,]+ GiB of weights, where this machine has"):
        refuse_too_large(AltUpT5Config.from_preset("base", num_layers=10_000, d_model=100_000))
