"""Every model beside a second implementation, written from the paper on Hugging Face's layers.

Nothing of altup computes here but the model under test: the stacks, the rules, the strides and the experts are
written as the paper's formulas say, the layers are Hugging Face's. Both run in float64 with the same weights, and
logits, loss and the gradient of every parameter must agree. Only the tables of names know how altup calls its
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import BertConfig, LlamaConfig, T5Config
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense

from altup.models.families import FAMILIES

Weights = dict[str, Tensor]
Layer = Callable[[Tensor], Tensor]
VOCABULARY, LAYERS, STRIDE, LOWEST = 60, 4, 3, torch.finfo(torch.float64).min
SHAPE = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": LAYERS}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "t5": {"num_heads": 3, "num_decoder_layers": 3, "relative_attention_num_buckets": 8,
           "relative_attention_max_distance": 12},
    "bert": {"num_heads": 3, "max_position_embeddings": 20, "attention_dropout": 0.0},
    "decoder": {"num_heads": 6, "num_kv_heads": 2, "attention_dropout": 0.0},
}  # fmt: skip
# Hugging Face's names within a layer's parts → altup's.
NAMES = {
    "t5": {"q": "attention.q", "k": "attention.k", "v": "attention.v", "o": "attention.o"},
    "t5 memory": {name: f"cross_attention.{name}" for name in "qkvo"},
    "t5 feed-forward": {name: f"feed_forward.{name}" for name in ("wi_0", "wi_1", "wo")},
    "bert": {
        "self.query": "attention.q",
        "self.key": "attention.k",
        "self.value": "attention.v",
        "output.dense": "attention.o",
        "output.LayerNorm": "attention_norm",
    },
    "bert feed-forward in": {"dense": "feed_forward.wi"},
    "bert feed-forward out": {"dense": "feed_forward.wo", "LayerNorm": "feed_forward_norm"},
    "decoder": {f"{name}_proj": f"attention.{name}" for name in "qkvo"},
    "decoder feed-forward": {f"{name}_proj": f"feed_forward.{name}" for name in ("gate", "up", "down")},
}


class Reference:
    """A model of the paper: `w` are the weights under altup's names, `c` is altup's config, read as data."""

    def __init__(self, family: str, config: Any, weights: Weights) -> None:
        self.c, self.w = config, weights
        self.K = config.num_blocks
        self.width = config.d_model * (self.K if config.widening == "wide" else 1)
        attention = {"attention_dropout": 0.0, "attn_implementation": "sdpa"}
        if family == "t5":
            shape = {"d_model": self.width, "d_kv": config.d_kv, "d_ff": config.d_ff}
            self.theirs: Any = T5Config(
                **shape, num_heads=config.num_heads, feed_forward_proj="gated-gelu", dropout_rate=0.0,
                relative_attention_num_buckets=config.relative_attention_num_buckets, is_decoder=False,
                relative_attention_max_distance=config.relative_attention_max_distance,
                attn_implementation="eager",
            )  # fmt: skip
        elif family == "bert":
            self.theirs = BertConfig(
                hidden_size=self.width, num_attention_heads=config.num_heads, intermediate_size=config.d_ff,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
                layer_norm_eps=config.layer_norm_epsilon,
            )  # fmt: skip
        else:
            self.theirs = LlamaConfig(
                hidden_size=self.width, num_attention_heads=config.num_heads, head_dim=config.d_kv,
                num_key_value_heads=config.num_kv_heads, intermediate_size=config.d_ff, **attention,
            )  # fmt: skip

    def part(self, module: nn.Module, layer: str, names: str, *args: Any, **kwargs: Any) -> Any:
        """A module of Hugging Face's with the weights of the layer named `layer`."""
        own = {name: name.rpartition(".") for name, _ in module.named_parameters()}
        own = {name: f"{layer}.{NAMES[names][where]}.{kind}" for name, (where, _, kind) in own.items()}
        weights = {name: self.w[ours] for name, ours in own.items() if ours in self.w}
        found = functional_call(module.double(), weights, args, kwargs)
        return found[0] if isinstance(found, tuple) else found

    def rms(self, x: Tensor, name: str, scale: float = 1.0) -> Tensor:
        eps = self.c.layer_norm_epsilon * scale
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self.w[f"{name}.weight"]

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.c.layer_norm_epsilon)

    def experts(self, x: Tensor, layer: str) -> Tensor:
        """Σ over the top k of pᵢ(x) Eᵢ(x), each expert computed for every token."""
        if not self.c.experts:
            return torch.zeros_like(x)
        p = torch.softmax(x @ self.w[f"{layer}.experts.router.weight"].T, dim=-1)
        w_in, w_out = self.w[f"{layer}.experts.w_in"], self.w[f"{layer}.experts.w_out"]
        inner = torch.relu(torch.einsum("btd,edh->bteh", x, w_in))
        every = torch.einsum("bteh,ehd->bted", inner, w_out)
        chosen = torch.zeros_like(p).scatter(-1, p.topk(self.c.expert_top_k, dim=-1).indices, 1.0)
        return torch.einsum("bte,bted->btd", p * chosen, every)

    # The widened representation

    def lift(self, embeddings: Tensor) -> list[Tensor]:
        if self.c.widening == "recycled":
            return [embeddings] * self.K
        if self.c.widening == "altup":
            return list(embeddings.chunk(self.K, dim=-1))
        if self.c.widening == "sum":
            return [sum(embeddings.chunk(self.K, dim=-1))]  # type: ignore[list-item]
        return [embeddings]

    def active(self, layer: int) -> int:
        if self.c.selection is None or len(self.blocks) == 1:
            return 0
        if isinstance(self.c.selection, list):
            return int(self.c.selection[layer])
        return layer % self.K if self.c.selection == "alternating" else 0

    def coefficients(self, name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """P [..., K, K] and g [..., K] of a layer that computed y from x."""
        if self.c.coefficients == "fixed":
            return torch.eye(self.K, dtype=x.dtype), torch.ones(self.K, dtype=x.dtype)
        if self.c.coefficients == "static":
            return self.w[f"{name}.P"], self.w[f"{name}.g"]
        norm, R, A, C = (self.w[f"{name}.{one}"] for one in ("norm", "R", "A", "C"))

        def modality(z: Tensor) -> Tensor:  # as in Gemma 3n
            normed = z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-6) * norm
            return torch.tanh(normed @ R.T / z.shape[-1])

        P = torch.eye(self.K, dtype=x.dtype) + torch.einsum("ijk,btk->btij", A, modality(x))
        return P, 1 + modality(y) @ C.T

    def run(self, stack: str, embeddings: Tensor, layers: list[Layer]) -> list[Tensor]:
        """Algorithm 1 over a stack: predict, compute on the active block, correct."""
        self.blocks = self.lift(embeddings)
        for index, layer in enumerate(layers):
            active = self.active(index)
            y = layer(self.blocks[active])
            if len(self.blocks) == 1:
                self.blocks = [y]
                continue
            P, g = self.coefficients(f"{stack}rule.updates.{index}", self.blocks[active], y)
            predicted = [
                sum(P[..., i, j, None] * block for j, block in enumerate(self.blocks)) for i in range(self.K)
            ]
            self.blocks = [x + g[..., i, None] * (y - predicted[active]) for i, x in enumerate(predicted)]  # type: ignore[operator]
        return self.blocks

    def lower(self, blocks: list[Tensor], mean: bool) -> Tensor:
        if self.c.widening == "recycled":
            return sum(blocks) / (self.K if mean else 1)  # type: ignore[return-value]
        return torch.cat(blocks, dim=-1)

    def strided(self, name: str, layer: Callable[..., Tensor], index: int, number: int) -> Layer:
        """Algorithm 2, or its baseline, around a layer that is neither the first nor the last of an encoder.

        `layer(x, stride, name)` computes on tokens that stand `stride` apart.
        """
        if self.c.sequence not in ("altup", "skip") or index in (0, number - 1):
            return lambda x: layer(x, 1, name)
        k = self.c.stride

        def skip(x: Tensor) -> Tensor:
            out = x.clone()
            out[:, ::k] = layer(x[:, ::k], k, f"{name}.layer")
            return out

        def altup(x: Tensor) -> Tensor:
            anchor = torch.arange(x.shape[1]) // k * k
            a, b = self.w[f"{name}.update.a"], self.w[f"{name}.update.b"]
            predicted = a[0] * x + a[1] * x[:, anchor]
            computed = layer(x[:, ::k], k, f"{name}.layer")
            return predicted + b * (computed[:, anchor // k] - predicted[:, anchor])

        return altup if self.c.sequence == "altup" else skip

    # The families

    def t5_layer(
        self, x: Tensor, name: str, mask: Tensor, bias: Tensor, memory: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        attention = T5Attention(self.theirs, layer_idx=0)
        x = x + self.part(
            attention, name, "t5", self.rms(x, f"{name}.attention_norm"), mask=mask, position_bias=bias
        )
        if memory is not None:
            normed = self.rms(x, f"{name}.cross_norm")
            x = x + self.part(attention, name, "t5 memory", normed, mask=seen, key_value_states=memory)
        normed = self.rms(x, f"{name}.feed_forward_norm")
        feed_forward = T5DenseGatedActDense(self.theirs)
        return x + self.part(feed_forward, name, "t5 feed-forward", normed) + self.experts(normed, name)

    def bias(self, stack: str, length: int, is_decoder: bool) -> Tensor:
        position = torch.arange(length)
        buckets = T5Attention._relative_position_bucket(
            position[None] - position[:, None], not is_decoder,
            self.c.relative_attention_num_buckets, self.c.relative_attention_max_distance,
        )  # fmt: skip
        return self.w[f"{stack}.relative_bias.weight"][buckets].permute(2, 0, 1)[None]

    def t5(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        table = self.w["encoder.embed_tokens.weight"]
        embeddings, mask = table[input_ids], attention_mask.double()
        if self.c.sequence == "pool":
            k = self.c.stride
            windows = [slice(i, i + k) for i in range(0, mask.shape[1], k)]
            total = [
                (embeddings[:, w] * mask[:, w, None]).sum(1) / mask[:, w].sum(1).clamp(min=1)[:, None]
                for w in windows
            ]
            embeddings = torch.stack(total, dim=1)
            mask = torch.stack([mask[:, w].max(dim=1).values for w in windows], dim=1)
        hidden = (1 - mask)[:, None, None] * LOWEST
        whole = self.bias("encoder", mask.shape[1], is_decoder=False)
        scale = self.K**2 if self.c.widening == "recycled" else 1  # a sum is K times the mean of the blocks

        def encode(x: Tensor, k: int, name: str) -> Tensor:
            return self.t5_layer(x, name, hidden[..., ::k], whole[:, :, ::k, ::k], None, None)

        names = [f"encoder.layers.{index}" for index in range(self.c.num_layers)]
        layers = [self.strided(name, encode, index, len(names)) for index, name in enumerate(names)]
        memory = self.rms(self.lower(self.run("encoder.", embeddings, layers), False), "encoder.final_norm", scale)

        length = decoder_input_ids.shape[1]
        future = torch.full((length, length), LOWEST, dtype=torch.float64).triu(1)[None, None]
        of_decoder = self.bias("decoder", length, is_decoder=True)

        def decode(name: str) -> Layer:
            return lambda x: self.t5_layer(x, name, future, of_decoder, memory, hidden)

        decoders = [decode(f"decoder.layers.{index}") for index in range(self.c.num_decoder_layers)]
        blocks = self.run("decoder.", table[decoder_input_ids], decoders)
        out = self.rms(self.lower(blocks, False), "decoder.final_norm", scale)
        return out @ self.w["lm_head.weight"].T

    def bert(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        at = "bert.embeddings"
        words = self.w[f"{at}.words.weight"][input_ids]
        if self.c.widening == "sum":
            words = sum(words.chunk(self.K, dim=-1))  # type: ignore[assignment]
        places, types = self.w[f"{at}.positions.weight"], self.w[f"{at}.token_types.weight"]
        embeddings = self.layer_norm(words + places[: input_ids.shape[1]] + types[0], f"{at}.norm")
        hidden = (1 - attention_mask.double())[:, None, None] * LOWEST

        def encode(x: Tensor, k: int, name: str) -> Tensor:
            attention: Any = BertAttention(self.theirs)
            attention.self.attention_head_size = self.c.d_kv  # theirs has the width over the heads
            attention.self.scaling = self.c.d_kv**-0.5
            attended = self.part(attention, name, "bert", x, hidden[..., ::k])
            inner = self.part(BertIntermediate(self.theirs), name, "bert feed-forward in", attended)
            beside = attended + self.experts(attended, name)
            return self.part(BertOutput(self.theirs), name, "bert feed-forward out", inner, beside)

        names = [f"bert.layers.{index}" for index in range(self.c.num_layers)]
        layers = [self.strided(name, encode, index, len(names)) for index, name in enumerate(names)]
        summed, self.c.widening = self.c.widening, "none" if self.c.widening == "sum" else self.c.widening
        out = self.lower(self.run("bert.", embeddings, layers), mean=True)
        self.c.widening = summed
        out = self.layer_norm(
            F.gelu(F.linear(out, self.w["head.transform.weight"], self.w["head.transform.bias"])), "head.norm"
        )
        return F.linear(
            out, self.w.get("head.decoder.weight", self.w[f"{at}.words.weight"]), self.w["head.decoder.bias"]
        )

    def decoder(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        embeddings = self.w["model.embed_tokens.weight"][input_ids]
        turn = LlamaRotaryEmbedding(self.theirs)(embeddings, torch.arange(length)[None])
        future = torch.full((length, length), LOWEST, dtype=torch.float64).triu(1)[None, None]

        def decode(name: str) -> Layer:
            def layer(x: Tensor) -> Tensor:
                normed = self.rms(x, f"{name}.attention_norm")
                attention = LlamaAttention(self.theirs, 0)
                x = x + self.part(attention, name, "decoder", normed, turn, future)
                normed = self.rms(x, f"{name}.feed_forward_norm")
                fed = self.part(LlamaMLP(self.theirs), name, "decoder feed-forward", normed)
                return x + fed + self.experts(normed, name)

            return layer

        layers = [decode(f"model.layers.{index}") for index in range(self.c.num_layers)]
        out = self.rms(self.lower(self.run("model.", embeddings, layers), mean=True), "model.final_norm")
        return out @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T


def loss_of(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """Mean over the tokens that count of cross-entropy + z·(log Σ exp)²."""
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    total = logits.logsumexp(-1)
    return (total - logits.gather(-1, labels[:, None])[:, 0] + z_loss * total**2).mean()


RULES: dict[str, dict[str, Any]] = {
    "dense": {},
    "altup 2": {"widening": "altup", "num_blocks": 2},
    "altup 3": {"widening": "altup", "num_blocks": 3},
    "same": {"widening": "altup", "num_blocks": 2, "selection": "same"},
    "recycled": {"widening": "recycled", "num_blocks": 2},
    "recycled 3 same": {"widening": "recycled", "num_blocks": 3, "selection": "same"},
    "sum": {"widening": "sum", "num_blocks": 2},
    "wide": {"widening": "wide", "num_blocks": 2},
    "dynamic": {"widening": "altup", "num_blocks": 2, "coefficients": "dynamic"},
    "dynamic recycled": {"widening": "recycled", "num_blocks": 2, "coefficients": "dynamic"},
    "fixed": {"widening": "altup", "num_blocks": 3, "coefficients": "fixed"},
    "experts": {"experts": 5, "expert_hidden": 7},
    "two experts": {"experts": 5, "expert_hidden": 7, "expert_top_k": 2},
    "altup and experts": {"widening": "altup", "num_blocks": 2, "experts": 5, "expert_hidden": 7},
}
SEQUENCES: dict[str, dict[str, Any]] = {
    "sequence-altup": {"sequence": "altup", "stride": STRIDE},
    "skip": {"sequence": "skip", "stride": STRIDE},
    "altup, sequence-altup and experts": {**RULES["altup and experts"], "sequence": "altup", "stride": STRIDE},
    "recycled, skip": {**RULES["recycled"], "sequence": "skip", "stride": STRIDE},
}
POOLED: dict[str, dict[str, Any]] = {
    "pool": {"sequence": "pool", "stride": STRIDE},
    "altup, pool": {**RULES["altup 2"], "sequence": "pool", "stride": STRIDE},
}
LISTED = {"widening": "altup", "num_blocks": 3, "selection": [2, 0, 0, 1]}
CASES = [
    *((family, name, fields) for family in OF_FAMILY for name, fields in RULES.items()),
    *((family, name, fields) for family in ("t5", "bert") for name, fields in SEQUENCES.items()),
    *(("t5", name, fields) for name, fields in POOLED.items()),
    *((family, "a list of blocks", LISTED) for family in ("bert", "decoder")),
    *((family, "tied", {"tie_word_embeddings": True}) for family in OF_FAMILY),
]


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("family", "name", "fields"), CASES, ids=[f"{family} {name}" for family, name, _ in CASES]
)
def test_every_model_is_the_papers(family: str, name: str, fields: dict[str, Any], trains: bool) -> None:
    torch.manual_seed(3)
    config = FAMILIES[family].config_class(
        **{**SHAPE, **OF_FAMILY[family], "dropout_rate": 0.0, "expert_jitter": 0.0, "z_loss": 1e-2, **fields}
    )
    model: Any = FAMILIES[family].model_class(config).double().train(trains)
    with torch.no_grad():
        for parameter in model.parameters():  # no coefficient, norm or bias stays where it starts
            parameter.add_(0.2 * torch.randn_like(parameter))
    # Padded on the right; tokens that do not count are those of padding and some others.
    ids = torch.randint(3, VOCABULARY, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    mask[1, 1:] = 0
    answers = torch.randint(3, VOCABULARY, (3, 5 if family == "t5" else 11))
    labels = answers.masked_fill(torch.rand(answers.shape) < 0.3, -100)
    given: dict[str, Tensor] = {"input_ids": ids}
    if family != "decoder":
        given["attention_mask"] = mask
    if family == "bert":
        labels = labels.masked_fill(mask == 0, -100)
    if family == "t5":
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, answers.shape)

    found = model(**given, **({"shift_labels": labels} if family == "decoder" else {"labels": labels}))
    found.loss.backward()

    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    reference = Reference(family, config, weights)
    if family == "t5" and config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["encoder.embed_tokens.weight"]
    logits = getattr(reference, family)(**given)
    loss = loss_of(logits, labels, 1e-2)
    loss.backward()

    real = mask.bool() if family == "bert" else slice(None)
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(found.logits[real], logits[real], **close)
    torch.testing.assert_close(found.loss, loss, **close)
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (weights[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad, weights[name].grad, **close, msg=lambda m, n=name: f"{n}: {m}"
            )
